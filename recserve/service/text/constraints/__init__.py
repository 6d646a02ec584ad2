"""Constraints of texts: what a request asks for, checked and compiled for one tokeniser."""
