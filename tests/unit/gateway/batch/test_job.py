"""What the process that runs batches is told, by its environment."""

from __future__ import annotations

from pathlib import Path

from gateway.access import Access
from gateway.batch.job import JobConfig, job_config


def test_all_of_it_arrives(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("ca")
    config = JobConfig("r", "n", "a:1", Path("/b"), 7, tls_ca=str(tmp_path / "ca"), api_key="k1")
    assert job_config(config.as_environment()) == config
    assert config.access("acme") == Access(tls=True, ca=b"ca", api_key="k1", tenant="acme")
    assert "k1" not in repr(config)


def test_by_default_gateways_are_called_as_nobody() -> None:
    assert JobConfig("r", "n", "a:1", Path("/b")).access("") == Access()
