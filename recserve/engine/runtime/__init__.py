"""What both schedulers share: the step, forward passes, request queue and CUDA graphs."""
