"""Training: data, loss and loop of every model, and the evaluation all of them share."""
