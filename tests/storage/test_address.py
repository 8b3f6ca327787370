"""Addresses of roots in object stores."""

import pytest

from coherent_ray.errors import ConfigError
from coherent_ray.storage.address import Address, parse_address


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("s3://bucket/run", Address("s3", "bucket", "run")),
        ("s3://bucket/a/b c/run-1", Address("s3", "bucket", "a/b c/run-1")),
        ("s3://bucket/run//", Address("s3", "bucket", "run")),
        ("s3://bucket", Address("s3", "bucket", "")),
        ("gs://my.bucket_1/", Address("gs", "my.bucket_1", "")),
        ("az://$web/run", Address("az", "$web", "run")),
    ],
)
def test_an_address_is_vendor_bucket_and_prefix(uri: str, address: Address) -> None:
    assert parse_address(uri) == address
    assert parse_address(address.uri) == address
    assert address.where("log/1") == f"{address.uri}/log/1"


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://user@host/run", "names no bucket"),
        ("s3://bucket:9000/run", "names no bucket"),
        ("s3://bucket/a//b", "prefix cannot be used"),
        ("s3://bucket/../other", "prefix cannot be used"),
        ("s3://bucket/a/./b", "prefix cannot be used"),
        ("s3://bucket/.tmp-x", "prefix cannot be used"),
        ("s3:/bucket/run", "two slashes"),
        ("gcs://bucket/run", "gcs is no kind of storage"),
    ],
)
def test_what_names_no_root_is_refused_with_the_forms_that_do(uri: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(uri)
    assert what in caught.value.what
    assert caught.value.where == uri
    assert "gs://BUCKET/PREFIX" in caught.value.remedy
