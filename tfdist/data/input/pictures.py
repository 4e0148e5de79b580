"""Sources whose examples are files: pictures with labels or masks, decoded in parallel when they are needed.

Where all of a split fits easily into memory it is decoded once and is then like any other source in memory; otherwise
each batch is decoded while those before it are trained on, by the rank that needs it.

    order of the epoch ──> this rank's examples ──> read, decode, check, fit to size ──> batch ──> augment ──> prefetch

The examples that can be decoded are found in a separate process: a dataset is loaded before a strategy chooses its
devices, and TensorFlow must not be initialized before that.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil

from tfdist.data.input import augmentation as augmentations
from tfdist.data.input import cache_folder, order
from tfdist.data.input.arrays import Arrays, label_type
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.division import Division
from tfdist.data.input.origin import Asked, Part
from tfdist.data.input.picture_files import Pictures
from tfdist.data.input.source import Source
from tfdist.data.input.tfrecords import Records
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError, UsageError
from tfdist.jobs.job_environment import cores
from tfdist.jobs.world import World

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.data.input.array_feed import OrderOf
    from tfdist.data.input.augmentation import Augmentation
    from tfdist.data.input.decoding import Decoder
    from tfdist.data.input.disk_cache import DiskCache
    from tfdist.data.input.feed import Feed
    from tfdist.data.input.picture_files import Pictures
    from tfdist.data.input.tf_datasets import DecodedBatches
    from tfdist.data.input.tfrecords import Records


# For each split, the numbers of the usable examples, and sentences about the others.
Found = dict[str, tuple[np.ndarray, list[str]]]


def good(spec: DataSpec, files: Mapping[str, Pictures | Records]) -> Found:
    """Decodes all examples once, on all cores."""
    # No GPU, because the training process needs its memory.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.data.input.scan"],
        input=pickle.dumps((spec, dict(files))),
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"The check of `{spec.name}` failed:\n{done.stderr.decode(errors='replace')}")
    return pickle.loads(done.stdout)


def _good_of(spec: DataSpec, files: Pictures | Records) -> tuple[np.ndarray, list[str]]:
    from tfdist.data.input import decoding, tf_datasets

    decoder = decoding.Decoder(spec, files)
    numbers = tf_datasets.numbers_of_good(decoder)
    bad = np.delete(np.arange(len(files)), numbers).tolist()
    return numbers, [decoder.problem(number) or f"`{files.name(number)}` cannot be read" for number in bad]


if __name__ == "__main__":
    spec, files = pickle.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(pickle.dumps({split: _good_of(spec, of_split) for split, of_split in files.items()}))


# A split that takes at most this share of the memory that is free is decoded once.
SHARE_OF_MEMORY = 0.25
# One whose pictures take at most this share of the disk that is free is decoded once onto it.
SHARE_OF_DISK = 0.5
CACHES = ("auto", "memory", "disk", "off")
SHUFFLES = ("examples", "files")
SHUFFLE_BUFFER = 10_000


class PictureSource(Source):
    """A source of picture files; see `Source`.

    Attributes:
        files: the files of each split that there is.
        cache: "memory" and "disk" decode a split once, "off" each epoch anew, "auto" chooses by its size.
    """

    def __init__(
        self,
        spec: DataSpec,
        files: Mapping[str, Pictures | Records],
        *,
        cache: str = "auto",
        policy: str = "fail",
        shuffle: str = "examples",
        shuffle_buffer: int = SHUFFLE_BUFFER,
    ):
        """Makes a source of the examples of `files`.

        Args:
            spec: the facts about the dataset, but for the number of examples.
            files: the files of each split that there is.
            cache: one of `CACHES`.
            policy: what to do with a bad example, one of `tfdist.data.input.bad_examples.POLICIES`; to leave them
                out, all are decoded once at the start, so that every epoch has the same examples.
            shuffle: one of `SHUFFLES`: "examples" draws an order of all examples; "files" draws one of TFRecord files,
                which are read one after the other, and shuffles within blocks of `shuffle_buffer` examples.
            shuffle_buffer: for "files".

        Raises:
            UsageError: an unknown cache, policy or way to shuffle, or `shuffle="files"` of pictures in a folder.
        """
        if cache not in CACHES:
            raise UsageError(f"`cache` is `{cache}`", f"use one of {', '.join(f'`{name}`' for name in CACHES)}")
        _check_shuffle(shuffle, shuffle_buffer, files)
        bad = BadExamples(policy)
        self.files = dict(files)
        self.cache = cache
        self._shuffle_buffer = shuffle_buffer if shuffle == "files" else 0
        self._caches: dict[tuple[str, bool], str] = {}
        self._decoders: dict[tuple[str, Augmentation | None], Decoder] = {}
        self._decoded: dict[Part, DecodedBatches] = {}
        self._disk_caches: dict[str, DiskCache] = {}
        if bad.skips:
            for split, (numbers, problems) in good(spec, self.files).items():
                self.files[split] = self.files[split].keep(numbers)
                for problem in problems:
                    bad.found(problem)
        spec = dataclasses.replace(spec, examples={split: len(pictures) for split, pictures in self.files.items()})
        super().__init__(spec, self._decode_all, skipped=bad.sentences)

    def cached(self) -> Self:
        source = self._with_spec()
        source.cache = "memory"
        source.origin = None if self.origin is None else dataclasses.replace(self.origin, cached=True)
        return source

    def _feed(self, asked: Asked, world: World) -> Feed:
        split, global_batch_size = asked.split, asked.global_batch_size
        if self.in_memory(split, self.augmentation(asked.augment)):
            return super()._feed(dataclasses.replace(asked, stream_positions=False), world)
        from tfdist.data.input.file_feed import FileFeed

        order_of = self._order_of(split, global_batch_size, asked.seed, asked.shuffle)

        part = Part(split, global_batch_size, world, asked.seed, 0, 0, asked.shuffle, asked.augment, True, False)

        def dataset(epoch: int, first_batch: int, end_batch: int | None) -> tf.data.Dataset:
            from tfdist.data.input import tf_datasets

            batches = self._decoded_batches(part).of_epoch(epoch, first_batch, end_batch)
            # The model's operations shall not wait behind decoding, however few threads they have.
            return tf_datasets.with_options(batches, cores(), True)

        def problem(epoch: int, first_batch: int, batches: int) -> DataError | None:
            first, last = first_batch * global_batch_size, (first_batch + batches) * global_batch_size
            return self._problem_among(split, order_of(epoch)[first:last])

        listing = self.files[split].listing
        return FileFeed(dataset, problem, self.spec.examples[split], global_batch_size, world, listing)

    def _batches(self, part: Part) -> tf.data.Dataset:
        augmentation = self.augmentation(part.augment)
        if not part.by_file and self.in_memory(part.split, augmentation):
            return super()._batches(part)
        return self._decoded_batches(part).of_epoch(part.epoch, part.first_batch)

    def _decoded_batches(self, part: Part) -> DecodedBatches:
        """The batches of all epochs; made once."""
        whole = dataclasses.replace(part, epoch=0, first_batch=0)
        if whole not in self._decoded:
            self._decoded[whole] = self._make_decoded_batches(whole)
        return self._decoded[whole]

    def _make_decoded_batches(self, part: Part) -> DecodedBatches:
        from tfdist.data.input import tf_datasets

        files, size = self.files[part.split], part.global_batch_size
        ranks = part.world.rank, Division.among_processes(part.world)
        order_of = self._order_of(part.split, size, part.seed, part.shuffle)
        augmentation = self.augmentation(part.augment)

        def parts_of(epoch: int) -> order.Parts:
            if part.by_file:
                return order.parts_by_file(order_of(epoch), files.file_numbers, size, *ranks)
            return order.Parts(order_of(epoch), size, *ranks)

        decoder = self._decoder(part.split, augmentation)
        kept = self.cache_of(part.split, augmentation) != "off"
        read_ahead = 0 if kept or part.by_file else self._shuffle_buffer // part.world.world_size
        if augmentation is None:
            return tf_datasets.DecodedBatches(
                decoder, parts_of, deterministic=part.deterministic, read_ahead=read_ahead
            )
        draws = augmentation.draws

        def draws_of(epoch: int) -> Callable[[np.ndarray], np.ndarray]:
            return augmentations.rows(self.spec.examples[part.split], draws, part.seed, epoch)

        return tf_datasets.DecodedBatches(decoder, parts_of, draws, draws_of, part.deterministic, read_ahead)

    def _shuffled(self, split: str, batch_size: int, seed: int) -> OrderOf:
        files = self.files[split]
        if not (self._shuffle_buffer and isinstance(files, Records)):
            return super()._shuffled(split, batch_size, seed)
        starts = np.minimum(files.starts, self.spec.examples[split])
        return lambda epoch: order.order_by_file(starts, self._shuffle_buffer, seed, epoch)

    def _decoder(self, split: str, augmentation: Augmentation | None) -> Decoder:
        from tfdist.data.input import decoding

        if (split, augmentation) not in self._decoders:
            cache = self._disk_cache(split) if self.cache_of(split, augmentation) == "disk" else None
            self._decoders[split, augmentation] = decoding.Decoder(self.spec, self.files[split], augmentation, cache)
        return self._decoders[split, augmentation]

    def in_memory(self, split: str, augmentation: Augmentation | None = None) -> bool:
        """Whether the split is decoded once into memory."""
        return self.cache_of(split, augmentation) == "memory"

    def cache_of(self, split: str, augmentation: Augmentation | None = None) -> str:
        """Where decoded examples are kept: "memory", "disk" or "off".

        A crop of random size is cut out of the whole picture, so the memory, which has pictures brought to size, is no
        place for it. What a model sees is the same wherever they are kept.
        """
        whole = augmentation is augmentations.RESIZED_CROP
        if self.cache != "auto":
            return "off" if whole and self.cache == "memory" else self.cache
        # Decided once: what is free changes, and a run shall not change its ways.
        if (split, whole) not in self._caches:
            self._caches[split, whole] = self._cache_by_size(split, whole)
        return self._caches[split, whole]

    def _cache_by_size(self, split: str, whole: bool) -> str:
        self._check_split(split)
        examples = self.spec.examples[split]
        shapes = self.spec.input_shape, self.spec.target_shape
        pixels, targets = (int(np.prod(shape)) for shape in shapes)
        in_memory = examples * (4 * pixels + self._target_type.itemsize * targets)
        # Each process of the job on this machine keeps all examples.
        available = psutil.virtual_memory().available / World.detect().local_world_size
        if not whole and in_memory <= SHARE_OF_MEMORY * available:
            return "memory"
        from tfdist.data.input import decoding

        on_disk = examples * decoding.Decoder(self.spec, self.files[split]).bytes_decoded()
        return "disk" if on_disk <= SHARE_OF_DISK * cache_folder.free_bytes() else "off"

    def _with_spec(self, **changes: Any) -> Self:
        changed = super()._with_spec(**changes)
        changed._caches, changed._disk_caches, changed._decoders, changed._decoded = {}, {}, {}, {}
        return changed

    def _disk_cache(self, split: str) -> DiskCache:
        from tfdist.data.input.disk_cache import DiskCache

        if split not in self._disk_caches:
            files = self.files[split]
            what = [self.spec.task, self.spec.input_shape[2], files.examples_fingerprint]
            self._disk_caches[split] = DiskCache(what, files.paths, len(files))
        return self._disk_caches[split]

    def _decode_all(self, split: str, count: int) -> Arrays:
        """All examples of a split, by all cores.

        Raises:
            DataError: one is bad; names the first.
        """
        from tfdist.data.input import decoding, tf_datasets

        files = self.files[split].keep(range(count))
        x = np.empty((count, *self.spec.input_shape), np.float32)
        y = np.empty((count, *self.spec.target_shape), self._target_type)
        done = 0
        with decoding.explained(lambda: self._problem_among(split, np.arange(done, count))):
            for pictures, targets in tf_datasets.all_examples(decoding.Decoder(self.spec, files)):
                end = done + len(pictures)
                x[done:end], y[done:end] = pictures, targets
                done = end
        return x, y

    @property
    def _target_type(self) -> np.dtype:
        """The type in which targets are held. Only masks are checked before, so that they fit into a smaller one."""
        if self.spec.task == "autoencoding":
            return np.dtype(np.float32)
        return label_type(self.spec) if self.spec.task == "segmentation" else np.dtype(np.int32)

    def _problem_among(self, split: str, indices: np.ndarray) -> DataError | None:
        """The error that names the first bad example among those with these numbers."""
        from tfdist.data.input import decoding

        decoder = decoding.Decoder(self.spec, self.files[split])
        problem = next(filter(None, map(decoder.problem, indices.tolist())), None)
        if problem is None:
            return None
        return DataError(problem, "repair it, or leave such examples out with `--on-bad-example skip`")


def _check_shuffle(shuffle: str, buffer: int, files: Mapping[str, Pictures | Records]) -> None:
    if shuffle not in SHUFFLES:
        raise UsageError(f"`shuffle` is `{shuffle}`", f"use one of {', '.join(f'`{name}`' for name in SHUFFLES)}")
    if buffer < 1:
        raise UsageError(f"`shuffle_buffer` is `{buffer}`", "use the number of examples of a block, from 1")
    if shuffle == "files" and not all(isinstance(of_split, Records) for of_split in files.values()):
        raise UsageError(
            "`shuffle` is `files`, and each of these files has one example only",
            "leave it out, or use a dataset of TFRecord files",
        )
