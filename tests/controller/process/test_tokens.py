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
