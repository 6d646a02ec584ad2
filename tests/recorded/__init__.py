"""Recorded answers: files, requests and their answers that every later commit must reproduce."""
