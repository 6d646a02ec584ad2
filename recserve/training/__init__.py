"""Training and evaluation of every model; the loop and its options are shared by all of them."""
