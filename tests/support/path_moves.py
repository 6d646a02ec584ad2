"""Random paths of slots for the kernel that moves accepted tokens."""

import torch


def draw_paths(paths, longest, seed=0):
    """Returns paths of slots.

    Every tree owns a range of slots. A path ascends through it, and its targets are the first
    slots.
    """
    g = torch.Generator().manual_seed(seed)
    room = 4 * longest
    starts = torch.arange(paths)[:, None] * room
    climb = torch.stack(
        [torch.randperm(room, generator=g)[:longest].sort().values for _ in range(paths)]
    )
    climb = torch.maximum(climb, torch.arange(longest))
    lengths = torch.randint(0, longest + 1, (paths,), generator=g)
    lengths[0] = longest
    return starts + climb, starts + torch.arange(longest), lengths, paths * room
