import os
import resource

import pytest
import structlog

from evenkeel_moe.api.auth import Role
from evenkeel_moe.controller.process.tokens import (
    FIRST_TOKEN_LASTS,
    TokenFile,
    write_first_token,
)
from evenkeel_moe.errors import InvalidInput

shared = pytest.mark.fault(
    "the owner of a data folder that others can write", "the first admin token was theirs to read"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
NOW = 1_800_000_000.0
OLD, NEW = "old-token-0123456789", "new-token-0123456789"


def write(path, *lines):
    fresh = path.with_suffix(".fresh")
    fresh.write_text("\n".join(lines))
    fresh.replace(path)


def test_tokens_rotate_without_a_restart(tmp_path):
    path = tmp_path / "tokens"
    write(path, f"ci operate {OLD}")
    tokens = TokenFile(path, lambda: NOW)
    assert (tokens.find(OLD) is None, tokens.find(NEW) is None) == (False, True)
    write(path, f"ci operate {OLD}", f"ci admin {NEW}")
    found = [tokens.find(secret) for secret in (OLD, NEW)]
    assert [token and token.role for token in found] == [Role.OPERATE, Role.ADMIN]
    write(path, f"ci admin {NEW}")
    assert (tokens.find(OLD) is None, tokens.find(NEW) is None) == (True, False)


@pytest.mark.parametrize("damage", ["empty", "misprint", "gone", "bytes"])
def test_a_file_that_is_damaged_leaves_the_tokens_as_they_were(tmp_path, damage):
    path = tmp_path / "tokens"
    write(path, f"ci operate {OLD}")
    tokens = TokenFile(path, lambda: NOW)
    if damage == "gone":
        path.unlink()
    elif damage == "bytes":
        path.write_bytes(b"\xff\xfe\xff")
    else:
        write(path, "" if damage == "empty" else f"ci king {NEW}")
    assert tokens.find(OLD) is not None
    assert tokens.find(NEW) is None
    write(path, f"ci read {NEW}")
    assert tokens.find(OLD) is None
    assert tokens.find(NEW) is not None


def test_a_first_file_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot read the token file"):
        TokenFile(tmp_path / "absent", lambda: NOW)
    write(tmp_path / "tokens", "# nobody")
    with pytest.raises(InvalidInput, match="no token"):
        TokenFile(tmp_path / "tokens", lambda: NOW)


def test_disk_full_at_the_first_start_blocks_no_later_start(tmp_path):
    path = tmp_path / "tokens"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))
    try:
        with pytest.raises(OSError):
            write_first_token(path, NOW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert not path.exists()
    assert write_first_token(path, NOW)
    text = path.read_text()
    token = TokenFile(path, lambda: NOW).find(text.split()[-1])
    assert token is not None and token.until is not None
    assert token.until == NOW + FIRST_TOKEN_LASTS.total_seconds()
    assert path.stat().st_mode & 0o777 == 0o600 and [*tmp_path.iterdir()] == [path]
    assert not write_first_token(path, NOW)
    assert path.read_text() == text, "a token that was given out stays"


def test_empty_file_that_an_earlier_version_left_is_replaced(tmp_path):
    path = tmp_path / "tokens"
    path.touch()
    assert write_first_token(path, NOW)
    assert TokenFile(path, lambda: NOW).find(path.read_text().split()[-1])


def test_a_token_is_none_from_its_end_on_and_the_log_names_it_once(tmp_path):
    write(tmp_path / "tokens", f"ci operate until=2027-01-15T08:00:00 {OLD}", f"ops admin {NEW}")
    now = NOW - 1.0
    tokens = TokenFile(tmp_path / "tokens", lambda: now)
    assert tokens.find(OLD) is not None
    now = NOW
    with structlog.testing.capture_logs() as said:
        assert [tokens.find(secret) is None for secret in (OLD, OLD, NEW)] == [True, True, False]
    assert [(line["event"], line["name"]) for line in said] == [("token_ended", "ci")]


@shared
@pytest.mark.parametrize("planted", ["link", "file", "folder"])
def test_a_first_token_is_never_written_where_another_user_reads(tmp_path, planted):
    theirs, path = tmp_path / "theirs", tmp_path / "data" / "tokens"
    theirs.write_text("theirs")
    path.parent.mkdir()
    for draft in (f"tokens.{os.getpid()}.new", "tokens.new"):
        entry = path.with_name(draft)
        match planted:
            case "link":
                entry.symlink_to(theirs)
            case "file":
                entry.hardlink_to(theirs)
            case _:
                entry.mkdir()
    assert write_first_token(path, NOW)
    assert theirs.read_text() == "theirs"
    assert TokenFile(path, lambda: NOW, own=True).find(path.read_text().split()[-1]) is not None
    assert path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink()


@shared
@pytest.mark.parametrize("target", ["a file", "nothing"])
def test_a_link_in_place_of_the_token_file_is_refused_by_name(tmp_path, target):
    theirs, path = tmp_path / "theirs", tmp_path / "tokens"
    if target == "a file":
        theirs.write_text(f"eve admin {OLD}\n")
    path.symlink_to(theirs)
    with pytest.raises(InvalidInput, match=rf"^{path} is a link"):
        write_first_token(path, NOW)
    with pytest.raises(InvalidInput, match=rf"^{path} is a link"):
        TokenFile(path, lambda: NOW, own=True)
    assert theirs.exists() == (target == "a file")


@shared
@pytest.mark.parametrize(
    ("owner", "mode", "words"),
    [
        pytest.param(4242, 0o600, "belongs to user 4242", marks=as_root),
        pytest.param(4242, 0o644, "belongs to user 4242", marks=as_root),
        (os.geteuid(), 0o666, "can be written by every user"),
        (os.geteuid(), 0o622, "can be written by every user"),
    ],
)
def test_a_token_file_that_another_user_can_write_is_refused_by_name(tmp_path, owner, mode, words):
    path = tmp_path / "tokens"
    write(path, f"eve admin {OLD}")
    tokens = TokenFile(path, lambda: NOW, own=True)
    write(path, f"eve admin {NEW}")
    path.chmod(mode)
    os.chown(path, owner, -1)
    with pytest.raises(InvalidInput, match=rf"^{path} {words}"):
        write_first_token(path, NOW)
    with pytest.raises(InvalidInput, match=rf"^{path} {words}"):
        TokenFile(path, lambda: NOW, own=True)
    assert tokens.find(NEW) is None and tokens.find(OLD) is not None


def test_a_file_that_an_operator_named_may_be_a_link_as_in_a_mounted_secret(tmp_path):
    write(tmp_path / "real", f"ci operate {OLD}")
    (tmp_path / "tokens").symlink_to(tmp_path / "real")
    assert TokenFile(tmp_path / "tokens", lambda: NOW).find(OLD) is not None
