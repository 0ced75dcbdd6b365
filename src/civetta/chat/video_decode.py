"""Videos to frames of the size a model sees, with their times. Needs PyAV for all but animations.

Nothing is believed of a file: its kind comes from its first bytes and picks the one demuxer that may
read it, since others follow references to other files; frames and pixels are bounded.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from civetta.chat.images import (
    BOMBS,
    DECODE_ERRORS,
    MAX_DECODED_PIXELS,
    MAX_SCANS,
    cut_patches,
    flattened,
    has_many_scans,
)
from civetta.chat.video_rules import BadVideo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import av

    from civetta.chat.images import PreparedImage
    from civetta.chat.video_rules import VideoRules

MAX_VIDEO_BYTES = 64 << 20
"""Bytes of one encoded video."""

MAX_VIDEO_FRAMES = 18_000
"""Frames of a video as it comes: ten minutes of thirty a second."""

MAX_VIDEO_PIXELS = 1 << 34
"""Pixels of all its frames: four minutes of 1920 x 1080, thirty a second."""

FORMATS = "MP4, WebM, Matroska, AVI, and animated GIF, WebP and PNG"

_ANIMATIONS = {b"GIF8": "GIF", b"\x89PNG": "PNG"}
_DEMUXERS = {"MP4": "mp4", "WebM": "matroska", "AVI": "avi"}

# FFmpeg's decoders of what cameras, browsers and editors write. It has hundreds more, for formats
# that nobody sends but to try them.
_DECODERS = frozenset(
    {
        *("h264", "hevc", "av1", "libdav1d", "libaom-av1"),
        *("vp8", "libvpx", "vp9", "libvpx-vp9"),
        *("mpeg1video", "mpeg2video", "mpeg4", "msmpeg4", "h263", "prores", "mjpeg"),
    }
)
CODECS = "H.264, HEVC, AV1, VP8, VP9, MPEG-1, MPEG-2, MPEG-4, H.263, ProRes and JPEG"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedVideo:
    """Groups of frames, each cut like an image, and the time of each in seconds."""

    groups: tuple[PreparedImage, ...]
    seconds: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Placeholders of all groups; the text of the times comes on top."""
        return sum(group.tokens for group in self.groups)


def prepare_video(data: bytes, rules: VideoRules) -> PreparedVideo:
    """Decode, choose, resize and cut an encoded video. Raises BadVideo."""
    kind = video_kind(data)
    if kind in _DEMUXERS:
        return _from_container(data, kind, rules)
    try:
        return _from_animation(data, kind, rules)
    except BOMBS as error:
        raise BadVideo(f"its frames have more than {MAX_DECODED_PIXELS} pixels") from error
    except DECODE_ERRORS as error:
        raise BadVideo(f"its {kind} data is damaged or incomplete ({_short(error)})") from error


def prepare_frames(
    frames: Iterable[Image.Image], seconds: Sequence[float], rules: VideoRules
) -> PreparedVideo:
    """Cut RGB frames that were chosen already; `seconds` is the time of each.

    Frames are taken one by one, and of each the resized form alone is held. Raises BadVideo for
    none, too many or odd ones.
    """
    count = len(seconds)
    if not count:
        raise BadVideo("it has no frames")
    if count > rules.max_frames:
        raise BadVideo(f"it has {count} frames, and {rules.max_frames} are the limit")
    first, size, fitted = (0, 0), (0, 0), []
    for number, frame in enumerate(frames, 1):
        if number == 1:
            first = frame.size
            _check_size(count, *first)
            size = rules.resized(count, frame.height, frame.width)
        elif frame.size != first:
            raise BadVideo(
                f"frame {number} has {frame.width} x {frame.height} pixels, the first one"
                f" {first[0]} x {first[1]}"
            )
        fitted.append(_fitted(frame, size))
    return _cut(fitted, seconds, rules)


def _cut(
    frames: Sequence[Image.Image], seconds: Sequence[float], rules: VideoRules
) -> PreparedVideo:
    """Groups of frames that have the right size; the last one is filled up with its last frame."""
    size = rules.image.temporal
    whole = [*frames, *[frames[-1]] * (-len(frames) % size)]
    return PreparedVideo(
        groups=tuple(
            cut_patches(whole[i : i + size], rules.image) for i in range(0, len(whole), size)
        ),
        seconds=rules.stamps(seconds),
    )


def video_kind(data: bytes) -> str:
    """What kind of video the bytes begin like; nothing is decoded. Raises BadVideo."""
    if not data:
        raise BadVideo("it is empty")
    if len(data) > MAX_VIDEO_BYTES:
        raise BadVideo(f"it has {len(data)} bytes, and {MAX_VIDEO_BYTES} are the limit")
    if data[4:8] == b"ftyp":
        return "MP4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "WebM"
    if data[:4] == b"RIFF" and data[8:12] in (b"AVI ", b"WEBP"):
        return "AVI" if data[8:12] == b"AVI " else "WEBP"
    if data[:4] in _ANIMATIONS:
        return _ANIMATIONS[data[:4]]
    raise BadVideo(f"its bytes are in no known video format; {FORMATS} are read")


def _from_animation(data: bytes, kind: str, rules: VideoRules) -> PreparedVideo:
    with Image.open(io.BytesIO(data), formats=(kind,)) as image:
        total = int(getattr(image, "n_frames", 1))
        _check_size(total, image.width, image.height)
        starts_s = [0.0]
        for number in range(total):
            image.seek(number)
            _check_size(total, image.width, image.height)  # a frame may reach beyond those before
            image.load()  # a WebP file tells a frame's time once it is decoded
            duration_ms = image.info.get("duration") or 100  # what browsers take for none
            starts_s.append(starts_s[-1] + float(duration_ms) / 1000)
        chosen = rules.chosen(total, total / starts_s[-1])
        size = rules.resized(len(chosen), image.height, image.width)
        frames = []
        for number in chosen:
            image.seek(number)
            frames.append(_fitted(flattened(image), size))
    return _cut(frames, [starts_s[number] for number in chosen], rules)


def _from_container(data: bytes, kind: str, rules: VideoRules) -> PreparedVideo:
    try:
        import av
    except ImportError as error:
        raise BadVideo(
            f"it is {kind}, and reading that needs PyAV: pip install 'civetta[video]'; or send"
            " frames"
        ) from error
    try:
        total, rate, width, height = _facts(data, kind)
        chosen = rules.chosen(total, rate)
        size = rules.resized(len(chosen), height, width)
        wanted, frames = set(chosen), []
        for number, frame in enumerate(_decoded(data, kind)):
            if number in wanted:
                picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
                upright = picture.rotate(frame.rotation, expand=True)
                frames.append(_fitted(upright, size))
            if number >= chosen[-1]:
                break
    except (av.error.FFmpegError, *DECODE_ERRORS) as error:
        raise BadVideo(f"its {kind} data is damaged or incomplete ({_short(error)})") from error
    if len(frames) < len(chosen):
        raise BadVideo(f"its {kind} data is damaged or incomplete (frames are missing)")
    return _cut(frames, [number / rate for number in chosen], rules)


def _facts(data: bytes, kind: str) -> tuple[int, float, int, int]:
    """Frames, frames a second, width and height as shown; bounds are checked."""
    import av

    with av.open(io.BytesIO(data), "r", format=_DEMUXERS[kind]) as container:
        if not container.streams.video:
            raise BadVideo("it has no picture")
        stream = container.streams.video[0]
        total, rate = stream.frames, float(stream.average_rate or 0)
        width, height = stream.codec_context.width, stream.codec_context.height
    _check_size(max(total, 1), width, height)
    first, counted = None, 0
    for frame in _decoded(data, kind):
        first, counted = first or frame, counted + 1
        if total:
            break
        _check_size(counted, frame.width, frame.height)
    if first is None:
        raise BadVideo("it has no frames")
    if rate <= 0:
        raise BadVideo("it does not say how many frames a second it has; send frames")
    width, height = first.width, first.height
    if first.rotation % 180:
        width, height = height, width
    return total or counted, rate, width, height


def _decoded(data: bytes, kind: str) -> Iterator[av.VideoFrame]:
    import av

    with av.open(io.BytesIO(data), "r", format=_DEMUXERS[kind]) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        codec = stream.codec_context.codec.name
        if codec not in _DECODERS:
            raise BadVideo(f"its pictures are {codec}; {CODECS} are read")
        pixels = 0
        for frame in _frames(container, stream, codec):  # of sizes that the head need not tell
            pixels += frame.width * frame.height
            if pixels > MAX_VIDEO_PIXELS:
                raise BadVideo(f"its frames have more than {MAX_VIDEO_PIXELS} pixels together")
            if frame.width * frame.height > MAX_DECODED_PIXELS:
                _check_size(1, frame.width, frame.height)
            yield frame


def _frames(
    container: av.container.InputContainer, stream: av.VideoStream, codec: str
) -> Iterator[av.VideoFrame]:
    for packet in container.demux(stream):
        if codec == "mjpeg" and has_many_scans(bytes(packet)):
            raise BadVideo(f"one of its frames has more than {MAX_SCANS} scans")
        yield from packet.decode()


def _check_size(frames: int, width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise BadVideo("its frames have no pixels")
    if width * height > MAX_DECODED_PIXELS:
        raise BadVideo(
            f"its frames have {width} x {height} pixels, and {MAX_DECODED_PIXELS} in all are the"
            " limit"
        )
    if frames > MAX_VIDEO_FRAMES or frames * width * height > MAX_VIDEO_PIXELS:
        most = min(MAX_VIDEO_FRAMES, MAX_VIDEO_PIXELS // (width * height))
        raise BadVideo(
            f"it has more than the {most} frames of {width} x {height} pixels that are read; send"
            " a shorter or smaller one, or some of its frames"
        )


def _fitted(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    height, width = size
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:80].rstrip(".") or type(error).__name__
