"""Vectors of items: making, quantising and searching them. Needs exactly one package of faiss."""

from recserve.extras import find_faiss

find_faiss()
