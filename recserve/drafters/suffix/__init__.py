"""The continuations of the longest suffix, in a text and in earlier outputs."""
