"""Recommendation and ranking: from a request to the engine's query and back to a response."""
