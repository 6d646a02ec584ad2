"""Key-value caches of a few megabytes for tests that give no size."""

from dataclasses import fields

from recserve.engine.engine_config import EngineConfig

CACHE_BYTES = 8 * 2**20


def shrink_default_caches() -> None:
    """Makes the default cache small.

    Filling the default 256 MiB of each model with zeros takes longer than most tests.
    """
    own = tuple(field.default for field in fields(EngineConfig))
    shrunk = tuple(CACHE_BYTES if one == EngineConfig.kv_bytes else one for one in own)
    assert own != shrunk and EngineConfig.__init__.__defaults__ == own
    EngineConfig.__init__.__defaults__ = shrunk
    EngineConfig.kv_bytes = CACHE_BYTES
