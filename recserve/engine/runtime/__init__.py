"""What both schedulers share: the forward, pages, prefix cache, queue and delivery."""
