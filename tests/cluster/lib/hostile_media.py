"""Attacks with pictures and recordings, on a cluster whose model takes them. Each refusal must name the part."""

import asyncio
import base64
import collections
import io
import json
import random
import struct
import wave
import zlib

from hostile_sockets import MIB, attack, connect, post, send

PART = "messages[0].content[0]."


def media(*allowed, mib=128):
    """An attack on the cluster with media. Its router has 64 MiB for them, and bodies take room of their own."""
    return attack(*allowed, mib=mib, cluster="media")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, rows, *more, end=True, is_rgb=True):
    """A PNG of 8-bit RGB, or of black and white, with `rows` rows of zeros, whatever its header says, and `more`
    chunks.
    """
    squeezed = zlib.compressobj(9)
    line, data = b"\0" * (1 + (3 * width if is_rgb else -(-width // 8))), []
    for _ in range(rows):
        data.append(squeezed.compress(line))
    data.append(squeezed.flush())
    form = (8, 2) if is_rgb else (1, 0)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *form, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", b"".join(data)) + (chunk(b"IEND", b"") if end else b"")


def crc(data, width, polynomial):
    value, top = 0, 1 << (width - 1)
    for byte in data:
        value ^= byte << (width - 8)
        for _ in range(8):
            value = ((value << 1) ^ polynomial if value & top else value << 1) & ((1 << width) - 1)
    return value


def flac(frames):
    """A FLAC of silence: 65,535 samples in 15 bytes per frame. The samples of 5,000 frames take five hours."""
    size = 65_535
    info = struct.pack(">HH", size, size) + bytes(6) + struct.pack(">Q", 16_000 << 44 | 15 << 36) + bytes(16)
    out = [b"fLaC\x80" + struct.pack(">I", len(info))[1:] + info]
    for number in range(frames):
        # Block size in 16 bits, 16 kHz from the header, one channel, 16 bits per sample.
        coded = chr(number).encode("utf-8", "surrogatepass")
        head = b"\xff\xf8\x70\x08" + coded + struct.pack(">H", size - 1)
        frame = head + bytes((crc(head, 8, 0x07),)) + b"\x00\x00\x00"
        out.append(frame + struct.pack(">H", crc(frame, 16, 0x8005)))
    return b"".join(out)


def wav(samples, sample_format=1, bits=16):
    form = struct.pack("<HHIIHH", sample_format, 1, 16_000, 16_000 * bits // 8, bits // 8, bits)
    data = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", 4 + len(data)) + b"WAVE" + data


def image(data, kind="png"):
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64," + base64.b64encode(data).decode()}}


def sound(data, kind="wav"):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def body(target, *parts, **more):
    chat = {"model": target.model, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}
    return json.dumps(chat | more).encode()


async def asked(target, data, part=PART):
    """Returns the outcome of one POST. A 400 that does not name the part is another outcome."""
    peer = await connect(target.http)
    try:
        head = post(target, "/v1/chat/completions", len(data), "connection: close\r\n")
        # The server may answer before it has read the whole body.
        sending = asyncio.create_task(send(peer, head + data))
        loop, answer = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(60):
                while piece := await loop.sock_recv(peer, 1 << 16):
                    answer += piece
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    except TimeoutError:
        return "open"
    except OSError:
        pass
    finally:
        peer.close()
    status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"
    names = part.encode() in answer.partition(b"\r\n\r\n")[2]
    return status if status != "400" or names else "400 that does not name the part"


async def in_turn(target, clients, bodies):
    """Sends the bodies again and again, from several clients, until the window ends."""

    async def one(client):
        seen = collections.Counter()
        for at in range(client, 1 << 30):
            seen[await asked(target, bodies[at % len(bodies)])] += 1
            if target.left() <= 0:
                return seen

    return sum(await asyncio.gather(*map(one, range(clients))), collections.Counter())


# Files of some kilobytes that a decoder would turn into gigabytes.
@media("400", "503")
async def decompression_bombs(target):
    inflated = zlib.compress(bytes(64 * MIB), 9)
    texts = [chunk(b"zTXt", b"a\0\0" + inflated)] * 16 + [chunk(b"iCCP", b"a\0\0" + inflated)]
    bombs = [
        image(png(65_535, 65_535, 1)),
        image(png(0x7FFF_FFFF, 0x7FFF_FFFF, 0)),
        image(png(100_000, 300, 1)),
        # Its text and its colours inflate to a gigabyte, and its last lines are missing.
        image(png(64, 64, 63, *texts)),
        # Just as many pixels as a picture may have, and one line too few.
        image(png(8_192, 4_096, 4_095)),
        sound(flac(5_000), "flac"),
    ]
    return await in_turn(target, 16, [body(target, bomb) for bomb in bombs])


@media("400", "503")
async def truncated_and_wrong_files(target):
    good = png(64, 64, 64)
    clip = io.BytesIO()
    with wave.open(clip, "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(16_000)
        file.writeframes(bytes(16_000))
    rng = random.Random(41)
    not_a_number = struct.pack("<f", float("nan")) * 8_000
    files = [image(good[:end]) for end in (0, 1, 8, 20, 33, 50, len(good) - 20)]
    files += [image(good[:16] + size + good[24:]) for size in (bytes(8), b"\xff" * 8, struct.pack(">II", 64, 1 << 30))]
    files += [image(rng.randbytes(5_000), kind) for kind in ("png", "jpeg", "webp")]
    files += [image(b"\xff\xd8\xff\xe0" + rng.randbytes(5_000), "jpeg"), image(b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03" + bytes(20), "jpeg")]
    files += [image(b"RIFF\xff\xff\xff\xffWEBPVP8 " + b"\xff" * 40, "webp"), image(b"RIFF\x20\0\0\0WEBPVP8L\x10\0\0\0\x2f\xff\xff\xff\xff" + bytes(20), "webp")]
    files += [sound(clip.getvalue()[:end]) for end in (0, 4, 20, 44)]
    files += [sound(wav(not_a_number, 3, 32)), sound(rng.randbytes(3_000), "mp3"), sound(b"fLaC" + rng.randbytes(3_000), "flac")]
    # Two clients, because they use the two processors, too.
    return await in_turn(target, 2, [body(target, file) for file in files])


# The part that is named is the first of those that are too many.
@media("400", "413", "503")
async def many_parts(target):
    small = image(png(8, 8, 8))
    sixty_four = [small] * 63 + [image(b"no picture")]
    frames = ",".join([base64.b64encode(png(8, 8, 8)).decode()] * 5_000)
    film = {"type": "video_url", "video_url": {"url": "data:video/png;base64," + frames, "fps": 1}}
    bodies = [(body(target, *[small] * 16_000), "messages[0].content["), (body(target, film), PART)]
    bodies += [(body(target, *sixty_four), "messages[0].content[63].")]
    bodies += [(body(target, small | {"image_url": {"url": "http://169.254.169.254/latest/meta-data"}}), PART)]
    seen = collections.Counter()
    while target.left() > 0:
        seen.update(await asyncio.gather(*(asked(target, *chosen) for chosen in bodies * target.count(4))))
    return seen


# Each picture is a file of 600 bytes and four million pixels, of which nearly all are decoded before the end is
# missing. Valid ones reach the device. Clients leave when the window ends, because the queue is longer than it.
@attack("200", "400", "503", mib=160, cluster="pictures")
async def floods_of_pictures(target):
    whole, cut = (image(png(2_000, 2_000, rows, is_rgb=False)) for rows in (2_000, 1_999))
    bodies, seen = [body(target, picture) for picture in (cut, cut, cut, whole)], collections.Counter()

    async def one(client):
        for at in range(client, 1 << 30):
            try:
                async with asyncio.timeout(target.left()):
                    seen[await asked(target, bodies[at % len(bodies)])] += 1
            except TimeoutError:
                return

    await asyncio.gather(*map(one, range(target.count(200))))
    return seen
