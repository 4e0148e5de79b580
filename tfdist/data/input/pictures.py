"""Sources whose examples are files: pictures with labels or masks, decoded in parallel when they are needed.

If a split easily fits into memory, it is decoded once and then used like any other source in memory. Otherwise, each
rank decodes its part of a batch during earlier steps:

    order of the epoch ──> this rank's examples ──> read, decode, check, resize, augment ──> batch ──> prefetch

To leave out bad examples, `tfdist.data.input.scan` decodes all examples in a separate process beforehand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil

from tfdist.data.input import augmentation as augmentations
from tfdist.data.input import disk_cache, order
from tfdist.data.input.arrays import Arrays, label_type
from tfdist.data.input.bad_examples import BadExamples
from tfdist.data.input.division import Division
from tfdist.data.input.picture_files import Pictures
from tfdist.data.input.picture_headers import MAX_PIXELS
from tfdist.data.input.scan import scan_all
from tfdist.data.input.source import FeedArguments, PipelineArguments, Source
from tfdist.data.input.tfrecords import Records
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError, UsageError
from tfdist.jobs.job_environment import cores
from tfdist.jobs.world import World

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.data.input.augmentation import Augmentation
    from tfdist.data.input.decoding import DecodedBatches, Decoder
    from tfdist.data.input.feed import Feed

# A split that takes at most this share of the free memory is decoded once into memory.
SHARE_OF_MEMORY = 0.25
# A split that takes at most this share of the free disk space is decoded once onto the disk.
SHARE_OF_DISK = 0.5
CACHES = ("auto", "memory", "disk", "off")
SHUFFLES = ("examples", "files")
SHUFFLE_BUFFER = 10_000


class PictureSource(Source):
    """A source of picture files; see `Source`.

    Attributes:
        files: the files of each split.
        cache: "memory" and "disk" decode a split once, "off" decodes it in each epoch, "auto" chooses by its size.
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
        max_pixels: int = MAX_PIXELS,
    ):
        """Makes a source of the examples of `files`.

        Args:
            spec: the facts about the dataset, without the number of examples.
            files: the files of each split.
            cache: one of `CACHES`.
            policy: what to do with a bad example, one of `tfdist.data.input.bad_examples.POLICIES`; to leave out bad
                examples, all examples are decoded once at the start, so that every epoch has the same examples.
            shuffle: one of `SHUFFLES`: "examples" shuffles all examples; "files" shuffles TFRecord files, which are
                read one after the other, and the examples within blocks of `shuffle_buffer` examples.
            shuffle_buffer: the number of examples per block for "files".
            max_pixels: the most pixels of a picture or a mask; a larger one is a bad example, and is not decoded.

        Raises:
            UsageError: an unknown cache, policy or `shuffle`, or `shuffle="files"` for pictures in a folder.
        """
        if cache not in CACHES:
            raise UsageError(f"`cache` is `{cache}`", f"use one of {', '.join(f'`{name}`' for name in CACHES)}")
        _check_shuffle(shuffle, shuffle_buffer, files)
        bad = BadExamples(policy)
        self.files = {split: dataclasses.replace(of_split, max_pixels=max_pixels) for split, of_split in files.items()}
        self.cache = cache
        self._shuffle_buffer = shuffle_buffer if shuffle == "files" else 0
        self._caches: dict[tuple[str, bool], str] = {}
        self._decoders: dict[tuple[str, Augmentation | None], Decoder] = {}
        self._decoded: dict[PipelineArguments, DecodedBatches] = {}
        self._disk_caches: dict[str, disk_cache.DiskCache] = {}
        if bad.skips:
            for split, (numbers, problems) in scan_all(spec, self.files).items():
                self.files[split] = self.files[split].keep(numbers)
                for problem in problems:
                    bad.add(problem)
        spec = dataclasses.replace(spec, examples={split: len(pictures) for split, pictures in self.files.items()})
        super().__init__(spec, self._decode_all, skipped=bad.sentences)

    def cached(self) -> Self:
        source = self._with_spec()
        source.cache = "memory"
        source.origin = self._origin_with(cached=True)
        return source

    def _feed(self, arguments: FeedArguments, world: World) -> Feed:
        split, batch_size = arguments.split, arguments.global_batch_size
        arguments = dataclasses.replace(arguments, stream_positions=False)
        if self.in_memory(split, self.augmentation(arguments.augment)):
            return super()._feed(arguments, world)
        from tfdist.data.input import file_feed

        order_of = self._order_of(arguments)

        def pipeline(epoch: int, first_batch: int, end_batch: int | None) -> tf.data.Dataset:
            batches = self._decoded_batches(PipelineArguments(arguments, world))
            # A pool of its own, so that the operations of the model need not wait for decoding.
            return file_feed.with_options(batches.of_epoch(epoch, first_batch, end_batch), cores(), True)

        def problem(epoch: int, first_batch: int, batches: int) -> DataError | None:
            first, last = first_batch * batch_size, (first_batch + batches) * batch_size
            return self._first_problem(split, order_of(epoch)[first:last])

        examples, listing = self.spec.examples[split], self.files[split].listing
        return file_feed.FileFeed(pipeline, problem, examples, batch_size, world, listing)

    def _batches(self, arguments: PipelineArguments) -> tf.data.Dataset:
        augmentation = self.augmentation(arguments.feed.augment)
        if not arguments.by_file and self.in_memory(arguments.feed.split, augmentation):
            return super()._batches(arguments)
        return self._decoded_batches(arguments).of_epoch(arguments.epoch, arguments.first_batch)

    def _decoded_batches(self, arguments: PipelineArguments) -> DecodedBatches:
        """The batches of all epochs, whatever the epoch and the first batch in `arguments`."""
        key = dataclasses.replace(arguments, epoch=0, first_batch=0)
        if key not in self._decoded:
            self._decoded[key] = self._make_decoded_batches(key)
        return self._decoded[key]

    def _make_decoded_batches(self, arguments: PipelineArguments) -> DecodedBatches:
        from tfdist.data.input import decoding

        split, batch_size, world = arguments.feed.split, arguments.feed.global_batch_size, arguments.world
        files, division, deterministic = self.files[split], Division.among_processes(world), arguments.deterministic
        order_of, augmentation = self._order_of(arguments.feed), self.augmentation(arguments.feed.augment)
        draws = 0 if augmentation is None else augmentation.draws

        def parts_of(epoch: int) -> order.Parts:
            if arguments.by_file:
                return order.parts_by_file(order_of(epoch), files.file_numbers, batch_size, world.rank, division)
            return order.Parts(order_of(epoch), batch_size, world.rank, division)

        def draws_of(epoch: int) -> Callable[[np.ndarray], np.ndarray]:
            return augmentations.rows(self.spec.examples[split], draws, arguments.feed.seed, epoch)

        decoder = self._decoder(split, augmentation)
        is_cached = self.cache_of(split, augmentation) != "off"
        read_ahead = 0 if is_cached or arguments.by_file else self._shuffle_buffer // world.world_size
        return decoding.DecodedBatches(decoder, parts_of, draws, draws_of, deterministic, read_ahead)

    def _shuffled(self, split: str, batch_size: int, seed: int) -> order.OrderOf:
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

        Memory is not used for crops of random size, which are cut from pictures at their original size, because it has
        resized pictures. What a model sees does not depend on the cache.
        """
        original_size = augmentation is augmentations.RESIZED_CROP
        if self.cache != "auto":
            return "off" if original_size and self.cache == "memory" else self.cache
        # Decided once, because the free memory changes during a run.
        if (split, original_size) not in self._caches:
            self._caches[split, original_size] = self._cache_by_size(split, original_size)
        return self._caches[split, original_size]

    def _cache_by_size(self, split: str, original_size: bool) -> str:
        self._check_split(split)
        examples = self.spec.examples[split]
        shapes = self.spec.input_shape, self.spec.target_shape
        pixels, targets = (int(np.prod(shape)) for shape in shapes)
        in_memory = examples * (4 * pixels + self._target_type.itemsize * targets)
        # Each process of the job on this machine keeps all examples in memory.
        available = psutil.virtual_memory().available / World.detect().local_world_size
        if not original_size and in_memory <= SHARE_OF_MEMORY * available:
            return "memory"
        from tfdist.data.input import decoding

        on_disk = examples * decoding.Decoder(self.spec, self.files[split]).bytes_decoded()
        return "disk" if on_disk <= SHARE_OF_DISK * disk_cache.free_bytes() else "off"

    def _with_spec(self, **changes: Any) -> Self:
        changed = super()._with_spec(**changes)
        changed._caches, changed._disk_caches, changed._decoders, changed._decoded = {}, {}, {}, {}
        return changed

    def _disk_cache(self, split: str) -> disk_cache.DiskCache:
        if split not in self._disk_caches:
            files = self.files[split]
            decoded_as = [self.spec.task, self.spec.input_shape[2], files.examples_fingerprint]
            self._disk_caches[split] = disk_cache.DiskCache(decoded_as, files.paths, len(files))
        return self._disk_caches[split]

    def _decode_all(self, split: str, count: int) -> Arrays:
        """Decodes the first `count` examples of a split on all cores.

        Raises:
            DataError: an example is bad; names the first.
        """
        from tfdist.data.input import decoding, file_feed

        files = self.files[split].keep(range(count))
        x = np.empty((count, *self.spec.input_shape), np.float32)
        y = np.empty((count, *self.spec.target_shape), self._target_type)
        done = 0
        with file_feed.explained(lambda: self._first_problem(split, np.arange(done, count))):
            for pictures, targets in decoding.all_examples(decoding.Decoder(self.spec, files)):
                end = done + len(pictures)
                x[done:end], y[done:end] = pictures, targets
                done = end
        return x, y

    @property
    def _target_type(self) -> np.dtype:
        """The type in which targets are stored: a smaller type only for masks, which were checked when decoded."""
        if self.spec.targets_are_inputs:
            return np.dtype(np.float32)
        return label_type(self.spec) if self.spec.task == "segmentation" else np.dtype(np.int32)

    def _first_problem(self, split: str, indices: np.ndarray) -> DataError | None:
        """The error that names the first bad example among those with these numbers; `None` if all are good."""
        from tfdist.data.input import decoding

        decoder = decoding.Decoder(self.spec, self.files[split])
        number, problem = next(
            ((number, problem) for number in indices.tolist() if (problem := decoder.problem(number))), (0, None)
        )
        if problem is None:
            return None
        too_large = decoder.too_large(number) is not None
        repair = "allow more with `--data-option max_pixels=N` if the memory suffices" if too_large else "repair it"
        return DataError(problem, f"{repair}, or leave such examples out with `--on-bad-example skip`")


def _check_shuffle(shuffle: str, buffer: int, files: Mapping[str, Pictures | Records]) -> None:
    if shuffle not in SHUFFLES:
        raise UsageError(f"`shuffle` is `{shuffle}`", f"use one of {', '.join(f'`{name}`' for name in SHUFFLES)}")
    if buffer < 1:
        raise UsageError(f"`shuffle_buffer` is `{buffer}`", "use the number of examples per block, at least 1")
    if shuffle == "files" and not all(isinstance(of_split, Records) for of_split in files.values()):
        raise UsageError(
            "`shuffle` is `files`, but each of these files has only one example",
            "leave it out, or use a dataset of TFRecord files",
        )
