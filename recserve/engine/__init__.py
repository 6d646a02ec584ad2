"""Pages, prefix cache, scheduler, runner and the step."""
