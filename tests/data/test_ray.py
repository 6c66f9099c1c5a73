"""Tokenising on a Ray cluster: a local head with two workers, one of which is killed."""

import os
import signal
import sys
from functools import partial

import pytest

from lib.data import frame_encoding, ray_pool, tokenize
from lib.data.ray_pool import RayPool
from lib.data.tokenize import tokenize_corpus
from lib.errors import UserError
from tests.data.raw_example import file_hashes
from tests.data.tiny_tokenizer import save_tiny
from tests.data.tokenizing_example import Watcher, many_texts, small_shards, task_of


@pytest.fixture(scope="module")
def address():
    """Two processors, whatever this machine has."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    yield cluster.address
    cluster.shutdown()


def die_once(marker, encode, job, frame):
    """Encodes; the first process that gets here dies instead, by SIGKILL."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return encode(job, frame)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_the_same_bytes_although_a_worker_dies(address, tmp_path, monkeypatch):
    save_tiny(tmp_path / "tokenizer")
    raw = small_shards(tmp_path, monkeypatch)
    tokenize_corpus(task_of(raw, tmp_path / "tokenizer", tmp_path / "here"), Watcher())
    marker, encode = tmp_path / "killed", frame_encoding.encode_frame
    monkeypatch.setattr(tokenize, "encode_frame", partial(die_once, marker, encode))
    watcher = Watcher()
    tokenize_corpus(task_of(raw, tmp_path / "tokenizer", tmp_path / "there", ray=address), watcher)
    assert marker.exists()
    assert watcher.documents == len(many_texts())
    assert file_hashes(tmp_path / "there") == file_hashes(tmp_path / "here")


def refuse_or_die(text):
    if text:
        raise UserError(text)
    os.kill(os.getpid(), signal.SIGKILL)


def test_errors_have_their_cause(address, monkeypatch):
    monkeypatch.setattr(ray_pool, "_RETRIES", 0)
    with RayPool(refuse_or_die, address, None) as pool:
        assert pool.count == 2
        with pytest.raises(UserError, match=r"^the file is wrong$"):
            pool.submit("the file is wrong").result()
        with pytest.raises(UserError, match=r"--ray .*: 1 workers died of the same task"):
            pool.submit("").result()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"--ray 127\.0\.0\.1:1: no cluster answers there"),
        ("127.0.0.1:99999", "no cluster answers there"),
        ("here", "must be auto, local or HOST:PORT"),
    ],
)
def test_no_cluster_is_told(address, message):
    with pytest.raises(UserError, match=message), RayPool(refuse_or_die, address, None):
        pass


def test_ray_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="the package ray is not installed; install it"):
        RayPool(refuse_or_die, "auto", None)
