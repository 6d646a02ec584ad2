"""The reliability campaign: faults, overload and attacks against a real server process."""
