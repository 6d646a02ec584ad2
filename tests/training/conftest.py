"""Trainings of these tests draw no picture, except where one is looked at."""

from tests.support.pictures import no_pictures, pictures

__all__ = ["no_pictures", "pictures"]
