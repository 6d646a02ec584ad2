"""Speed and quality of ranking given candidates."""
