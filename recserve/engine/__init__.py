"""The engine: it queues requests, schedules them, runs forward passes and delivers results."""
