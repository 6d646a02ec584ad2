"""What both schedulers share: forward passes, pages, prefix cache, request queue and graphs."""
