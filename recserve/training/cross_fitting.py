"""Item vectors for training that do not know the events they help to predict.

Collaborative vectors are fitted on all training events, so an item's vector lies close to the
histories that it is about to be a positive of, and a similarity feature would be trusted more than
it deserves. Fitted anew without a fold of the users, they say to that fold what they will say to an
event of tomorrow. The features read nothing but cosines, so each fit may have axes of its own.
"""

from __future__ import annotations

import numpy as np

from recserve.features.tables.events import EventLog
from recserve.features.vectors.vectors import collaborative_vectors, join_vectors, unit

NUM_FOLDS = 4


def cross_fitted_vectors(
    vectors: np.ndarray, train: EventLog, collaborative_dim: int, weight: float, seed: int
) -> list[np.ndarray]:
    """Vectors for users 0, 4, 8 .., for users 1, 5, 9 .. and so on, fitted without those users.

    vectors: [I, F], the last collaborative_dim columns collaborative, joined with `weight`.
    Returns four times [I, F], or an empty list where no column is collaborative.
    """
    if not collaborative_dim:
        return []
    content = unit(vectors[:, :-collaborative_dim])
    users = train.user_indices()
    return [
        join_vectors(
            content,
            collaborative_vectors(
                train.select(users % NUM_FOLDS != fold), len(vectors), collaborative_dim, seed
            ),
            weight,
        )
        for fold in range(NUM_FOLDS)
    ]
