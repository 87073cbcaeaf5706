"""What is written where a user said: whole, and in nothing else's place."""

import errno
import os
import stat
import threading

import pytest

from stowax import _files, _streams
from stowax._errors import ArgumentError
from stowax._files import check_writable, read_own, write_own, write_whole


def test_a_file_keeps_its_mode_and_a_new_one_has_the_usual(tmp_path):
    secret, new = tmp_path / "secret", tmp_path / "new"
    secret.write_text("old")
    secret.chmod(0o600)
    write_whole(secret, "plan")
    assert secret.read_text() == "plan"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    umask = os.umask(0o027)
    try:
        write_whole(new, b"plan")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["new", "secret"]


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_stays_a_link(tmp_path, dangling):
    folder, link = tmp_path / "runs", tmp_path / "latest.json"
    folder.mkdir()
    link.symlink_to("runs/plan.json")
    if not dangling:
        (folder / "plan.json").write_text("old")
    check_writable(link, "-o")
    write_whole(link, "plan")
    assert link.is_symlink()
    assert (folder / "plan.json").read_text() == "plan"
    assert os.listdir(folder) == ["plan.json"]


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    link = tmp_path / "plan.json"
    link.symlink_to("gone/plan.json")
    with pytest.raises(ArgumentError, match="gone' is no folder"):
        check_writable(link, "-o")
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(ArgumentError, match="cannot be written"):
        write_whole(link, "plan")


def test_a_device_and_a_pipe_are_written_to(tmp_path):
    for path in ("/dev/null", "/dev/full"):
        check_writable(path, "-o")
    write_whole("/dev/null", "plan")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(ArgumentError) as caught:
        write_whole("/dev/full", "plan", "-o")
    assert str(caught.value) == (
        "-o: got '/dev/full', which cannot be written (No space left on device). Give "
        "a file in a folder that exists and may be written to."
    )
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_writable(pipe, "-o")
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "plan")
    reader.join(10)
    assert read == ["plan"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_our_own_stdout_stays_the_file_that_others_write_to(tmp_path, capfd):
    path, saved = tmp_path / "out", os.dup(1)
    with open(path, "wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        try:
            before = path.stat().st_ino
            os.write(1, b"before, ")
            write_whole("/dev/stdout", "plan")
            os.write(1, b", after")
            assert path.stat().st_ino == before
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert path.read_text() == "before, plan, after"


def test_what_fails_midway_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_files.os, "replace", full)
    with pytest.raises(ArgumentError, match="No space left on device"):
        write_whole(path, "plan")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_names_of_files_that_are_no_text_are_written(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, "at \udcff.py")
    assert path.read_bytes() == b"at ?.py"


def test_our_own_folder_follows_no_link_and_waits_for_no_pipe(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.write_text("precious")
    ours.symlink_to(theirs)
    write_own(ours, b"plan")
    assert theirs.read_text() == "precious"
    assert read_own(ours) == b"plan"
    assert not ours.is_symlink()
    ours.unlink()
    os.mkfifo(ours)
    with pytest.raises(OSError, match="a pipe"):
        read_own(ours)
    write_own(ours, b"plan")
    assert read_own(ours) == b"plan"


@pytest.mark.parametrize("in_memory", [True, False])
def test_chatter_is_kept_off_without_a_temporary_folder(
    monkeypatch, capfd, in_memory, tmp_path
):
    def none(*_, **__):
        raise FileNotFoundError("no usable temporary folder")

    monkeypatch.setattr(_streams.tempfile, "TemporaryFile", none)
    if not in_memory:
        monkeypatch.setattr(_streams.os, "memfd_create", none)
    with _streams.quiet_native_log():
        os.write(2, b"I0000 cudart_stub.cc:31] no drivers\nworth reading\n")
    said = capfd.readouterr().err
    assert "worth reading" in said
    assert ("cudart_stub" in said) is not in_memory
