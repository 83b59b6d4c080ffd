"""Batches of images that are read when they are needed, by processes beside the one that trains.

A `Stream` enters; batches leave, the next ones being read while one is trained on (torch's `DataLoader`).  What
holds: which images a batch has, and what is looked at of them, follows from the seed and the epoch's number,
however many processes read; an item that cannot be read is one sentence, not a traceback from another process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from ..errors import DataError, PruningError
from ..graph.trace import same_chance
from ..team import Team
from .batches import Batch, Batches, How
from .splits import Stream, check_item, wrong_label

Key = int | tuple[int, tuple[float, ...]]  # a row of the dataset, and perhaps the window of it to look at
Chance = int  # what random numbers are drawn from while an item is read


class Loaded(Batches):
    """Batches of images that are read when they are needed; `workers` processes read them, or this one (0)."""

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        workers: int = 0,
        **how: Unpack[How],
    ) -> None:
        super().__init__(stream, batch_size, mean, std, **how)
        self.stream, self.workers = stream, workers

    def epoch(self, index: int, first: int = 0) -> Iterator[Batch]:
        return self._read(index, Team(), first)

    def parts(self, index: int, team: Team, first: int = 0) -> Iterator[Batch]:
        if self.augment and self.augment.mixup:  # blends reach across the batch, which must be whole for them
            return super().parts(index, team, first)
        return self._read(index, team, first)

    def _read(self, index: int, team: Team, first: int) -> Iterator[Batch]:
        """The batches of an epoch, or a team's part of each."""
        drawn = self.draw(index) if self.augment else {"order": torch.arange(self.count)}
        starts = range(first * self.batch_size, len(self) * self.batch_size, self.batch_size)
        rows = [torch.arange(start, min(start + self.batch_size, self.count)) for start in starts]
        mine = [part for part in map(team.part, rows) if len(part)]  # the last may be smaller than the team
        order, windows = drawn.pop("order"), drawn.pop("window", None)
        # A stream of its own for every item: what is random in it does not depend on who reads it, nor on the rest.
        seeds = np.random.SeedSequence((self.seed, index, 2)).generate_state(self.count)
        chances = torch.from_numpy(seeds.astype(np.int64))
        keys = [self._keys(order[part], None if windows is None else windows[part]) for part in mine]
        given = [list(zip(own, chances[part].tolist(), strict=True)) for own, part in zip(keys, mine, strict=True)]
        for part, read in zip(mine, self._loaded(given), strict=True):
            images, labels = (held.to(self.device, non_blocking=True) for held in self._checked(read, team))
            if self.augment:
                chosen = {name: choice[part].to(self.device) for name, choice in drawn.items()}
                yield self.dressed(images, labels, **chosen)
            else:
                yield self.normalised(images), labels

    def _keys(self, order: Tensor, windows: Tensor | None) -> list[Key]:
        rows = self.stream.rows[order].tolist()
        return rows if windows is None else list(zip(rows, map(tuple, windows.tolist()), strict=True))

    def _loaded(self, keys: list[list[tuple[Key, Chance]]]) -> Iterator[Batch | DataError]:
        """What the processes beside this one have read.

        Errors are raised elsewhere, where nothing holds on to these processes: they end as this generator does.
        """
        loader: DataLoader[Any] = DataLoader(
            _Reading(self.stream, self.num_classes),
            batch_sampler=keys,
            num_workers=min(self.workers, len(keys)),
            collate_fn=_as_it_is,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_outlast_signals,
            generator=torch.Generator(),  # or it would draw from the one that the user has
        )
        try:
            yield from loader
        except RuntimeError as error:  # a process that was killed, or that has no room to hand images over
            reason = str(error).splitlines()[0]
            raise DataError(f"images cannot be read beside training ({reason}); set data.workers=0") from error

    @staticmethod
    def _checked(read: Batch | DataError, team: Team) -> Batch:
        if isinstance(read, DataError):
            read.alone = not team.alone  # each process reads items of its own
            raise read
        return read


def sample(stream: Stream, most: int, seed: int) -> Tensor:
    """The images of up to `most` rows, evenly spread, with chances that follow from the seed alone."""
    found = _Reading(stream).__getitems__([(row, seed % 2**32) for row in stream.spread(most)])
    if isinstance(found, DataError):
        raise found
    return found[0]


class _Reading(Dataset[Any]):
    """Whole batches of a stream; one that cannot be read is the error that says why."""

    def __init__(self, stream: Stream, num_classes: int = 0) -> None:
        self.stream, self.num_classes = stream, num_classes  # 0: whatever they are

    def __getitems__(self, keys: Sequence[tuple[Key, Chance]]) -> Batch | DataError:
        row = -1
        try:
            items = []
            for key, chance in keys:
                row = key if isinstance(key, int) else key[0]
                with same_chance(nn.Identity(), chance):
                    image, label = self.stream.dataset[key]
                self._check(image, label, row)
                items.append((image.detach(), int(label)))
            images, labels = default_collate(items)
        except PruningError as error:
            return DataError(str(error))
        except Exception as error:
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            return DataError(f"{self._item(row)} cannot be read ({reason}); mend it, or leave it out")
        return images, labels

    def _check(self, image: Tensor, label: Any, row: int) -> None:
        item = self._item(row)
        check_item((image, label), item)
        if (image.dtype == torch.uint8) != self.stream.pixels:
            raise DataError(f"{item} is {image.dtype}, the first is not; give all in one type")
        if tuple(image.shape) != self.stream.shape:
            raise DataError(
                f"{item} is {tuple(image.shape)}, and the first {self.stream.shape} (channels, height, width); "
                "bring all to one size"
            )
        if self.num_classes and (wrong := wrong_label(torch.tensor(int(label)), self.num_classes)) is not None:
            raise DataError(f"{item}: {wrong}")

    def _item(self, row: int) -> str:
        return f"{self.stream.where}, item {row}"


def _outlast_signals(worker: int) -> None:
    """Ignore the first SIGINT and SIGTERM in a worker.

    Terminals and schedulers send them to all processes of a group.  The run stops after its present step, for which
    it may need another batch, and ends its workers then.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda given, frame: signal.signal(given, signal.SIG_DFL))


def _as_it_is(batch: Any) -> Any:
    return batch
