"""The load tool of `recserve bench` and `recserve ab`: requests over HTTP, measures, a report."""
