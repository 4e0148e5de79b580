"""Pictures with too many pixels are not decoded, whatever their format."""

import io
import struct
import subprocess
import sys
import zlib

import pytest
import tensorflow as tf
from PIL import Image

from tfdist import data
from tfdist.data.input import picture_headers
from tfdist.data.input.decoding import Decoder
from tfdist.data.input.tfrecords import Records, index
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError

FORMATS = {"PNG": "png", "JPEG": "jpg", "GIF": "gif", "BMP": "bmp", "WEBP": "webp"}


def encoded(kind, width=37, height=23, **options):
    content = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(content, kind, **options)
    return content.getvalue()


def png_bomb(side=20_000):
    """A PNG of 20,000 x 20,000 pixels, which compresses to about a megabyte."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    compressor = zlib.compressobj(9)
    row = bytes(1 + 3 * side)
    rows = b"".join(compressor.compress(row * 100) for _ in range(side // 100)) + compressor.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def folder_of(path, name, content):
    for label in ("a", "b"):
        for number in range(2):
            file = path / "train" / label / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded("PNG"))
    (path / "train" / "b" / name).write_bytes(content)
    return path


@pytest.mark.parametrize("kind", FORMATS)
def test_the_header_has_the_size(kind):
    assert picture_headers.size_of(encoded(kind))[:2] == (23, 37)


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"save_all": True, "exif": b"Exif\0\0"}])
def test_the_header_has_the_size_of_each_kind_of_webp(options):
    assert picture_headers.size_of(encoded("WEBP", **options))[:2] == (23, 37)


def test_the_header_of_a_progressive_jpeg_with_metadata_has_the_size():
    content = encoded("JPEG", progressive=True, exif=b"Exif\0\0" + bytes(5000), icc_profile=bytes(100_000))
    assert picture_headers.size_of(content)[:2] == (23, 37)


def test_the_frames_of_a_gif_count():
    frames = [Image.new("RGB", (37, 23), colour) for colour in ("red", "green", "blue")]
    content = io.BytesIO()
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:])
    assert picture_headers.size_of(content.getvalue()) == (23, 37, 3)


@pytest.mark.parametrize("kind", FORMATS)
def test_no_beginning_of_a_picture_is_an_error(kind):
    content = encoded(kind)
    for length in range(len(content)):
        picture_headers.size_of(content[:length])


@pytest.mark.parametrize(("kind", "suffix"), [item for item in FORMATS.items() if item[0] != "WEBP"])
def test_a_picture_above_the_limit_is_named_with_its_size_the_limit_and_the_option(tmp_path, kind, suffix):
    folder = folder_of(tmp_path, f"large.{suffix}", encoded(kind, 200, 100))
    source = data.load("image_folder", folder, size=8, max_pixels=10_000)
    with pytest.raises(DataError) as caught:
        source.arrays("train")
    file = folder / "train" / "b" / f"large.{suffix}"
    assert caught.value.sentence == f"`{file}` has 200 x 100 pixels, and at most 10,000 pixels are decoded"
    assert "--data-option max_pixels=" in caught.value.hint and "--on-bad-example skip" in caught.value.hint
    x, _ = data.load("image_folder", folder, size=8, max_pixels=20_000).arrays("train")
    assert len(x) == 5


def test_the_first_picture_may_be_too_large_too(tmp_path):
    folder = folder_of(tmp_path, "large.png", encoded("PNG"))
    with pytest.raises(DataError, match=r"The first picture, .* has 37 x 23 pixels, and at most 100 pixels"):
        data.load("image_folder", folder, max_pixels=100)


def test_a_record_with_a_picture_or_a_mask_above_the_limit_is_named(tmp_path):
    path = tmp_path / "a.tfrecord"
    contents = {"image": encoded("PNG"), "mask": encoded("PNG", 200, 100)}
    features = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[content])) for name, content in contents.items()
    }
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    spec = DataSpec("a", "segmentation", (8, 8, 3), 2, {"train": 1}, target_shape=(8, 8))
    records = Records((path,), index([path]), "mask", masks=True, max_pixels=10_000)
    problem = Decoder(spec, records).problem(0)
    assert problem == f"The mask at byte 12 of {path} has 200 x 100 pixels, and at most 10,000 pixels are decoded"


@pytest.mark.thorough
def test_a_small_file_with_a_huge_picture_takes_no_memory(tmp_path):
    folder = folder_of(tmp_path, "bomb.png", png_bomb())
    assert (folder / "train" / "b" / "bomb.png").stat().st_size < 3_000_000
    script = (
        "from tfdist import data; from tfdist.callbacks.memory import peak_resident_bytes\n"
        "from tfdist.errors import DataError\n"
        "before = peak_resident_bytes()\n"
        f"source = data.load('image_folder', {str(folder)!r}, size=8)\n"
        "try:\n    source.arrays('train')\nexcept DataError as error:\n    print(error)\n"
        "print(peak_resident_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "has 20,000 x 20,000 pixels, and at most 100,000,000 pixels are decoded" in done.stdout
    assert int(done.stdout.split()[-1]) < 300e6, "decoded, it is 1.2 GB"
