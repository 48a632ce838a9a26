"""Files that may be replaced while a server runs."""

import pytest
import structlog

from evenkeel_moe.adapters.watched_files import WatchedFiles


@pytest.mark.fault(
    "an operator who took a certificate away", "found one line in the log for each handshake"
)
def test_a_file_that_is_gone_is_told_once_and_what_was_read_stays(tmp_path):
    path = tmp_path / "leaf.pem"
    path.write_text("first")
    files = WatchedFiles("certificate", [path], path.read_text)
    assert files.first() == "first"
    path.unlink()
    with structlog.testing.capture_logs() as said:
        assert [files.changed() for _ in range(3)] == [None] * 3
        path.write_text("second")
        assert [files.changed() for _ in range(2)] == ["second", None]
    assert [line["event"] for line in said] == ["certificate_not_taken", "certificate_changed"]


@pytest.mark.fault(
    "an operator who corrected the mode of a renewed key",
    "the certificate before it stayed in use until it expired",
)
def test_a_file_is_read_again_when_only_its_mode_has_changed(tmp_path):
    path = tmp_path / "leaf.key"
    path.write_text("first")

    def read() -> str:
        if not path.stat().st_mode & 0o400:  # These tests may run as root, who may read all.
            raise PermissionError(13, "Permission denied", str(path))
        return path.read_text()

    files = WatchedFiles("certificate", [path], read)
    assert files.first() == "first"
    path.write_text("renewed")
    path.chmod(0)
    assert files.changed() is None
    path.chmod(0o400)
    assert files.changed() == "renewed"
