"""What HTTP adds to an answer, and what other processes on the machine cost."""
