"""What `recserve doctor` checks: kernels, and drafters for their targets."""
