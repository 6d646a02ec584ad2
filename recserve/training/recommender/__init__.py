"""Training of the generative recommender and of what builds on its states: retriever, baseline."""
