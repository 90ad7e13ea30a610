"""Fetching the archives of IMDB and CIFAR-10 from a loopback server: cut, changed or absent."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import DataError, DiskFullError
from paceline.data.download import CIFAR10_FILES, download_cifar10, download_imdb
from paceline.data.sources.cifar import read_cifar
from paceline.recipe.parts import SplitsPart
from tests.testing.ports import free_port

SPLITS = SplitsPart(train=12, validation=4, test=4)


class Server:
    """Serves ``content`` with or without ranges and can cut the first answers short."""

    def __init__(self) -> None:
        self.content = b""
        self.cuts: list[int] = []
        """Bytes sent of each of the next answers."""
        self.ranges = True
        self.status = 200
        self.asked: list[str | None] = []
        """Range of every request."""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = False
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/data/archive.tar.gz"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.asked.append(asked)
            if server.status != 200:
                self.send_error(server.status)
                return
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
            if start and start >= len(server.content):
                self.send_error(416)
                return
            body = server.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()
    yield served
    served.close()


def _file(name: str, content: bytes = b"text") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def _special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def _archive(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content) if content else None)
    return written.getvalue()


def _honest() -> list[tuple[tarfile.TarInfo, bytes]]:
    members = [_special("aclImdb", tarfile.DIRTYPE), _file("aclImdb/README", b"About"), _file("aclImdb/imdb.vocab")]
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            for number in range(5):
                text = f"Review {number} of {part}, {label}: café<br /><br />\u2028\nSecond line."
                members.append(_file(f"aclImdb/{part}/{label}/{number}_1.txt", text.encode()))
        members.append(_file(f"aclImdb/{part}/urls_pos.txt"))
    members.append(_file("aclImdb/train/unsup/0_0.txt", b"No label."))
    return members


def _binary_cifar() -> bytes:
    """Two images a file, the label of each its number; and a name that leads elsewhere."""
    names = "\n".join(f"class{number}" for number in range(10))
    contents = {name: b"".join(bytes([n]) + bytes([200 + n]) * 3072 for n in (3, 7)) for name in CIFAR10_FILES}
    contents["batches.meta.txt"] = f"{names}\n".encode()
    members = [_file(f"cifar-10-batches-bin/{name}", content) for name, content in contents.items()]
    members += [_file("cifar-10-batches-bin/readme.html", b"x"), _file("../evil.bin", b"x")]
    return _archive([_special("cifar-10-batches-bin", tarfile.DIRTYPE), *members])


def test_cifar10_is_written_as_its_binary_version_and_read(server: Server, tmp_path: Path) -> None:
    server.content, server.cuts = _binary_cifar(), [100]
    options: dict[str, Any] = {"url": server.url, "md5": _md5(server.content)}
    paths = download_cifar10(tmp_path / "cifar10", **options)
    assert [path.name for path in paths.values()] == list(CIFAR10_FILES)
    assert sorted(path.name for path in (tmp_path / "cifar10").iterdir()) == sorted(CIFAR10_FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10"]
    assert server.asked[:2] == [None, "bytes=100-"], "it goes on where it was cut"
    rows = list(read_cifar(tmp_path / "cifar10", "cifar10").rows)
    assert len(rows) == 12
    assert {row.values["label"] for row in rows} == {"class3", "class7"}
    server.status = 500
    assert download_cifar10(tmp_path / "cifar10", **options) == paths, "what is there is not fetched again"


def test_cifar10_with_a_wrong_checksum_is_removed(server: Server, tmp_path: Path) -> None:
    server.content = _binary_cifar()
    with pytest.raises(DataError, match="wrong checksum"):
        download_cifar10(tmp_path, url=server.url, md5="0" * 32)
    assert list(tmp_path.iterdir()) == []


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _get(server: Server, folder: Path, **options: Any) -> dict[str, Path]:
    options = {"url": server.url, "md5": _md5(server.content), "splits": SPLITS} | options
    return download_imdb(folder, **options)


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]


def test_writes_three_stratified_files(server: Server, tmp_path: Path) -> None:
    server.content = _archive(_honest())
    seen: list[tuple[int, int | None]] = []
    paths = _get(server, tmp_path / "imdb", progress=lambda have, total: seen.append((have, total)))
    rows = {name: _rows(path) for name, path in paths.items()}
    assert {name: len(found) for name, found in rows.items()} == {"train": 12, "validation": 4, "test": 4}
    for found in rows.values():
        assert sum(row["label"] == "positive" for row in found) == len(found) / 2
        for row in found:
            assert f"{row['label'][:3]}: café<br /><br />\u2028\nSecond line." in row["text"]
    assert len({row["text"] for found in rows.values() for row in found}) == 20
    assert seen[-1] == (len(server.content), len(server.content))
    assert sorted(path.name for path in (tmp_path / "imdb").iterdir()) == [
        "test.jsonl",
        "train.jsonl",
        "validation.jsonl",
    ]


def test_files_that_are_there_are_not_fetched_again(server: Server, tmp_path: Path) -> None:
    server.content = _archive(_honest())
    first = _get(server, tmp_path)
    content = {name: path.read_bytes() for name, path in first.items()}
    assert _get(server, tmp_path) == first
    assert len(server.asked) == 1
    first["test"].unlink()
    _get(server, tmp_path)
    assert {name: path.read_bytes() for name, path in first.items()} == content, "the split is seeded"


def test_a_cut_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.content = _archive(_honest())
    server.cuts = [100, 50]
    _get(server, tmp_path)
    assert server.asked == [None, "bytes=100-", "bytes=150-"]


def test_a_later_call_takes_up_the_download(server: Server, tmp_path: Path) -> None:
    server.content = _archive(_honest())
    server.cuts = [50, 0]
    with pytest.raises(DataError, match=r"cannot be downloaded(.|\n)*50 bytes are kept(.|\n)*goes on where it stopped"):
        _get(server, tmp_path)
    _get(server, tmp_path)
    assert server.asked == [None, "bytes=50-", "bytes=50-"], "a connection that brings nothing ends the call"


def test_a_server_without_ranges_sends_everything_again(server: Server, tmp_path: Path) -> None:
    server.content = _archive(_honest())
    server.cuts, server.ranges = [100], False
    assert len(_rows(_get(server, tmp_path)["train"])) == 12


def test_an_archive_that_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    server.content = _archive(_honest())
    (tmp_path / "aclImdb_v1.tar.gz").write_bytes(server.content)
    assert len(_rows(_get(server, tmp_path)["train"])) == 12
    assert server.asked == []


@pytest.mark.parametrize("left", [b"x" * 10, b"x" * 100_000], ids=["shorter", "longer"])
def test_a_damaged_archive_is_removed_and_fetched_again(server: Server, tmp_path: Path, left: bytes) -> None:
    server.content = _archive(_honest())
    (tmp_path / "aclImdb_v1.tar.gz").write_bytes(left)
    with pytest.raises(DataError, match=r"wrong checksum(.|\n)*run the command again"):
        _get(server, tmp_path)
    assert len(_rows(_get(server, tmp_path)["train"])) == 12


def test_a_wrong_checksum_removes_the_file(server: Server, tmp_path: Path) -> None:
    server.content = _archive(_honest())
    with pytest.raises(DataError, match=r"wrong checksum(.|\n)*instead of 0123"):
        _get(server, tmp_path, md5="0123")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [403, 404, 503])
def test_refusals(server: Server, tmp_path: Path, status: int) -> None:
    server.content, server.status = b"x", status
    with pytest.raises(DataError, match="cannot be downloaded"):
        _get(server, tmp_path)
    assert len(server.asked) == 1


def test_no_network(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/archive.tar.gz"
    with pytest.raises(DataError, match=r"cannot be downloaded\n  why: .*refused\n  fix: check the network"):
        download_imdb(tmp_path, url=url)


def test_a_disk_without_room(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.content = b"x" * 1000
    usage = type("Usage", (), {"free": 999})
    monkeypatch.setattr("paceline.contract.files.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DiskFullError, match="1,000 bytes needed, 999 bytes free"):
        _get(server, tmp_path)
