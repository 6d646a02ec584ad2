"""A catalogue behind several replicas, in memory: its log, its faults, and guarantees to break.

Steps of all clients and replicas are drawn from one seed, so that a history can be had again.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.campaign.catalog_histories import HIDDEN, End, Operation, Result, Version

ITEMS = [f"item{number}" for number in range(5)]
INITIAL = dict.fromkeys(ITEMS, HIDDEN)
# What a fleet can be told to do wrong.
NO_CONDITION, NO_EPOCH, TRIM_EARLY, OWN_IDS, STALE_READS = (
    "appends without a condition",
    "keeps its epoch after a failover",
    "trims before the snapshot is stored",
    "computes ids at each replica",
    "ignores the version that a request names",
)
MISTAKES = (NO_CONDITION, NO_EPOCH, TRIM_EARLY, OWN_IDS, STALE_READS)
NUM_REPLICAS, NUM_CLIENTS, NUM_OPERATIONS, MAX_EPOCHS = 3, 5, 250, 4

Cell = tuple[str, tuple[int, ...]]  # value and semantic id
Content = dict[str, Cell]
EMPTY: Content = dict.fromkeys(ITEMS, (HIDDEN, ()))


@dataclass
class Log:
    """The log of changes: entries by number, a snapshot, and the epoch."""

    entries: dict[int, Content] = field(default_factory=dict)
    last: int = 0
    epoch: int = 1
    snapshot: tuple[int, Content] = (0, EMPTY)
    epochs: dict[int, int] = field(default_factory=dict)  # by number, also of trimmed entries


@dataclass
class Replica:
    """A replica: how far it has read, and the versions that it knows."""

    number: int
    position: int = 0
    epoch: int = 1
    versions: dict[int, Content] = field(default_factory=lambda: {0: EMPTY})

    @property
    def content(self) -> Content:
        return self.versions[self.position]

    @property
    def version(self) -> Version:
        return Version("bundle", self.epoch, self.position)


class Fleet:
    """A fleet that answers clients in drawn order.

    Attributes:
        operations: The history.
    """

    def __init__(self, seed: int, mistake: str = "", failovers: bool = False) -> None:
        self.draw, self.mistake, self.failovers = random.Random(seed), mistake, failovers
        self.log = Log()
        self.replicas = [Replica(number) for number in range(NUM_REPLICAS)]
        self.operations: list[Operation] = []
        self.acknowledged: set[tuple[int, int]] = set()
        self.left_behind: Log | None = None
        self.newest = Version("bundle", 1, 0)
        self.known: dict[int, Version] = {}
        self.now = self.begun = 0

    def run(self) -> list[End]:
        """Runs all operations; returns what the replicas answer at the end."""
        clients: dict[int, Iterator[None]] = {}
        while self.begun < NUM_OPERATIONS or clients:
            self.now += 1
            number = self.draw.randrange(NUM_CLIENTS)
            if number not in clients and self.begun < NUM_OPERATIONS:
                self.begun += 1
                clients[number] = self.request(number)
            if number in clients and next(clients[number], self) is self:
                del clients[number]
            if self.draw.random() < 0.3:
                self.follow(self.draw.choice(self.replicas), self.draw.randrange(1, 4))
            if self.draw.random() < 0.02:
                self.trim()
            if self.failovers and self.log.epoch < MAX_EPOCHS and self.draw.random() < 0.01:
                self.fail_over()
        for replica in self.replicas:
            self.follow(replica, self.log.last + 1)
        return [End(one.number, one.version, one.content, [one.content]) for one in self.replicas]

    def request(self, client: int) -> Iterator[None]:
        """One operation; each `yield` lets others go on."""
        replica, began = self.draw.choice(self.replicas), self.now
        newest = self.draw.random() < 0.5
        at_least = self.newest if newest else self.known.get(client)
        yield
        for _ in range(200):
            if at_least is None or self.mistake == STALE_READS or reached(replica, at_least):
                break
            self.follow(replica, 1)
            yield
        else:
            return  # the deadline
        kind = self.draw.choice(["put", "put", "hide", "rollback", *["read"] * 5])
        common = {"client": client, "replica": replica.number, "kind": kind, "began": began}
        common |= {"at_least": at_least, "newest": newest}
        if kind == "read":
            version, content = replica.version, dict(replica.content)
            yield
            self.finish(
                version,
                result=Result.OK,
                seen={item: value for item, (value, _) in content.items()},
                codes={item: codes for item, (_, codes) in content.items() if codes},
                **common,
            )
            return
        items = self.draw.sample(ITEMS, self.draw.randrange(1, 3))
        token = f"t{self.begun}.{self.now}"
        restored = Version("bundle", replica.epoch, self.draw.choice([*replica.versions]))
        if kind == "rollback":
            common["restores"] = restored
        else:
            common["writes"] = dict.fromkeys(items, token if kind == "put" else HIDDEN)
        for _ in range(20):
            base, epoch = replica.position, replica.epoch
            if kind == "rollback":
                if epoch != restored.epoch or restored.number not in replica.versions:
                    return
                entry = replica.versions[restored.number]
            else:
                codes = (len(token) + base, client) if kind == "put" else ()
                entry = {item: (value, codes) for item, value in common["writes"].items()}
            yield
            if self.append(base + 1, epoch, entry):
                break
            self.follow(replica, 1)
        else:
            return
        number = base + 1
        if self.draw.random() < 0.1:  # the answer is lost
            self.finish(None, result=Result.UNKNOWN, **common)
            return
        self.acknowledged.add((epoch, number))
        yield
        self.finish(Version("bundle", epoch, number), result=Result.OK, **common)

    def finish(self, version: Version | None, **operation) -> None:
        self.now += 1
        if version is not None:
            self.newest = max(self.newest, version, key=lambda one: one[1:])
            self.known[operation["client"]] = version
        self.operations.append(Operation(ended=self.now, version=version, **operation))

    def append(self, number: int, epoch: int, entry: Content) -> bool:
        """Appends an entry behind a position; False if another one is there."""
        if self.mistake != NO_CONDITION and (
            number != self.log.last + 1 or epoch != self.log.epoch
        ):
            return False
        self.log.entries[number] = entry
        self.log.last = max(self.log.last, number)
        self.log.epochs[number] = epoch
        return True

    def follow(self, replica: Replica, count: int) -> None:
        """Applies some entries that the replica does not have yet."""
        log = self.log
        if replica.epoch != log.epoch or replica.position > log.last:
            replica.epoch, replica.position = log.epoch, log.snapshot[0]
            replica.versions = {log.snapshot[0]: log.snapshot[1]}
            count = log.last  # it answers again once it has read the whole log
        for _ in range(count):
            number = replica.position + 1
            if number > log.last:
                return
            if number not in log.entries:  # trimmed
                number = max(log.snapshot[0], min(log.entries, default=1) - 1)
                content = log.snapshot[1]
            else:
                entry = log.entries[number]
                if self.mistake == OWN_IDS:
                    entry = {
                        k: (v, (*c, replica.number) if c else ()) for k, (v, c) in entry.items()
                    }
                content = replica.content | entry
            replica.position = number
            replica.versions[number] = content
            replica.versions = dict(list(replica.versions.items())[-6:])

    def trim(self) -> None:
        """Stores a snapshot and drops the entries that it holds."""
        source = max(self.replicas, key=lambda one: (one.epoch == self.log.epoch, one.position))
        if source.epoch != self.log.epoch or source.position > self.log.last:
            return
        if self.mistake != TRIM_EARLY:
            self.log.snapshot = (source.position, source.content)
        self.log.entries = {n: e for n, e in self.log.entries.items() if n > source.position}

    def fail_over(self) -> None:
        """Loses the last entries, as a replica of the store that was behind becomes the primary.

        It may also be the primary before, which has never read what came after it.
        """
        epoch = self.log.epoch + (self.mistake != NO_EPOCH)
        before, self.left_behind = self.left_behind, copy.deepcopy(self.log)
        if before is not None and self.draw.random() < 0.3:
            self.log = before
        else:
            log = self.log
            log.last = max(log.snapshot[0], log.last - self.draw.randrange(4))
            log.entries = {n: e for n, e in log.entries.items() if n <= log.last}
            log.epochs = {n: e for n, e in log.epochs.items() if n <= log.last}
        self.log.epoch = epoch

    @property
    def num_lost(self) -> int:
        """Number of acknowledged writes that the log does not have."""
        return sum(self.log.epochs.get(number) != epoch for epoch, number in self.acknowledged)


def reached(replica: Replica, version: Version) -> bool:
    """Whether a replica has a version, or the epoch of that version has ended."""
    if replica.epoch == version.epoch:
        return replica.position >= version.number
    return replica.epoch > version.epoch
