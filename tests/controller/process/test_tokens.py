import pytest

from evenkeel_moe.api.auth import Role
from evenkeel_moe.controller.process.tokens import TokenFile
from evenkeel_moe.errors import InvalidInput

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


def write(path, *lines):
    fresh = path.with_suffix(".fresh")
    fresh.write_text("\n".join(lines))
    fresh.replace(path)


def test_tokens_rotate_without_a_restart(tmp_path):
    path = tmp_path / "tokens"
    write(path, f"ci operate {OLD}")
    tokens = TokenFile(path)
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
    tokens = TokenFile(path)
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
        TokenFile(tmp_path / "absent")
    write(tmp_path / "tokens", "# nobody")
    with pytest.raises(InvalidInput, match="no token"):
        TokenFile(tmp_path / "tokens")
