"""Loads a bundle on all servers of a shared catalogue, one after another.

One server is asked and stores the load in Redis. From then on no server leads. Each one looks at
the load with every report (`heartbeat`), and does the next step that it can do itself:

    loading     it takes its turn, loads the bundle, gives the turn back and reports the load's id.
                If it cannot load, the load is `returning`.
    returning   it takes its turn, restores the bundle that it had, and no longer reports the id
    end         a server that sees that all have done so ends the load

So a server that is killed stops nothing: its turn is free once it is silent, and one that starts
meanwhile loads the bundle too.
"""

from __future__ import annotations

import logging
import secrets

from recserve.features.catalog.fleet import (
    FAILED,
    LOADING,
    READY,
    RETURNING,
    FleetDirectory,
    Rollout,
)
from recserve.schemas.admin import FleetLoad
from recserve.server.errors import NotReady, SwapConflict
from recserve.server.lifecycle import EXPECTED_ERRORS, Lifecycle

log = logging.getLogger(__name__)


class FleetMember:
    """The part of one server in loads of the whole fleet.

    Attributes:
        done: Id of the load whose bundle this server has; empty without one.
    """

    def __init__(self, lifecycle: Lifecycle, replica_id: str) -> None:
        """Takes part in no load yet.

        Args:
            lifecycle: Replaces the bundle.
            replica_id: Name of this server among those of the catalogue.
        """
        self.done = ""
        self._lifecycle, self._id = lifecycle, replica_id
        self._switched = False  # whether it had another bundle before
        self._turn: Rollout | None = None  # the load for which it replaces its bundle now
        self._latest: Rollout | None = None

    @property
    def status(self) -> FleetLoad | None:
        """The latest load of the fleet; None without one."""
        found = self._latest
        if found is None:
            return None
        return FleetLoad(path=found.path, state=found.state, message=found.message)

    def begin(self, directory: FleetDirectory, name: str, force: bool) -> FleetLoad:
        """Stores a load for all servers.

        Args:
            directory: The reports of the servers.
            name: Name of a folder in `bundles_dir`, which all servers have.
            force: Accepts other items and missing models.

        Raises:
            AdminDisabled: If this server has no `bundles_dir`.
            UnknownBundle: If there is no such bundle in it.
            SwapConflict: If a load of the fleet is in progress.
            FleetUnavailable: If Redis does not answer.
        """
        digest = self._lifecycle.digest(name)
        rollout = Rollout(id=secrets.token_hex(8), path=name, digest=digest, force=force)
        if not directory.begin(rollout):
            raise SwapConflict("the servers load a bundle one after another; wait for them")
        self._latest = rollout
        return FleetLoad(path=name, state=rollout.state, message="")

    def step(self, directory: FleetDirectory, rollout: Rollout | None) -> bool:
        """Does what this server can do now.

        Args:
            directory: The reports of the servers.
            rollout: The latest load.

        Returns:
            Whether the report has changed.

        Raises:
            FleetUnavailable: If Redis does not answer.
        """
        self._latest = rollout
        before = self.done
        if self._turn is not None:
            self._end_turn(directory, self._turn)
        elif rollout is not None and rollout.active and not self._lifecycle.swapping:
            try:
                if rollout.state == LOADING:
                    self._load(directory, rollout)
                else:
                    self._return(directory, rollout)
            except NotReady:
                pass  # the server starts or ends
        return self.done != before

    def _load(self, directory: FleetDirectory, rollout: Rollout) -> None:
        if self.done == rollout.id:
            others = directory.read().replicas
            if all(one.rollout == rollout.id for one in others if one.state != "draining"):
                directory.advance(rollout, self._id, READY)
            return
        if self._lifecycle.current.digest == rollout.digest:
            self.done, self._switched = rollout.id, False
        elif directory.take_turn(rollout, self._id):
            self._begin_turn(directory, rollout)

    def _return(self, directory: FleetDirectory, rollout: Rollout) -> None:
        if self.done != rollout.id:
            if not any(one.rollout == rollout.id for one in directory.read().replicas):
                directory.advance(rollout, self._id, FAILED)
        elif not self._switched or self._lifecycle.current.digest != rollout.digest:
            self.done = ""
        elif directory.take_turn(rollout, self._id):
            self._begin_turn(directory, rollout)

    def _begin_turn(self, directory: FleetDirectory, rollout: Rollout) -> None:
        try:
            if rollout.state == LOADING:
                self._lifecycle.load(rollout.path, rollout.force, rollout.digest)
            else:
                self._lifecycle.rollback()
            self._turn = rollout
        except (*EXPECTED_ERRORS, PermissionError) as error:
            if self._lifecycle.swapping:  # an operator was faster; this one loads later
                directory.advance(rollout, self._id, rollout.state)
            else:
                self._tell(directory, rollout, False, str(error))

    def _end_turn(self, directory: FleetDirectory, rollout: Rollout) -> None:
        if not self._lifecycle.swapping:
            status = self._lifecycle.status()
            self._tell(directory, rollout, status.state == "ready", status.message)
            self._turn = None

    def _tell(
        self, directory: FleetDirectory, rollout: Rollout, worked: bool, message: str
    ) -> None:
        """Ends the turn of this server.

        Args:
            directory: The reports of the servers.
            rollout: The load.
            worked: Whether the server has another bundle now.
            message: Why it has not.
        """
        loading = rollout.state == LOADING
        state = LOADING if loading and worked else RETURNING
        reason = "" if worked else f"{self._id}: {message}"
        if reason and rollout.message:
            reason = f"{rollout.message}; {reason}"
        if reason:
            log.error("the bundle %s of the fleet: %s", rollout.path, message)
        directory.advance(rollout, self._id, state, reason)
        if worked and loading:
            self.done, self._switched = rollout.id, True
        else:
            self.done = ""
