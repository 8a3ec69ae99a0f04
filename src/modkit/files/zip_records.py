"""The records of a zip file, with the field names of its specification, section 4.3 of APPNOTE.TXT.

All numbers are little-endian: ``H`` has 2 bytes, ``L`` has 4 and ``Q`` has 8.
"""

import struct
from typing import Final, NamedTuple


END: Final = struct.Struct("<4s4H2LH")
ZIP64_END: Final = struct.Struct("<4sQ2H2L4Q")
ZIP64_LOCATOR: Final = struct.Struct("<4sLQL")
TABLE_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")

END_SIGNATURE: Final = b"PK\x05\x06"
ZIP64_END_SIGNATURE: Final = b"PK\x06\x06"
ZIP64_LOCATOR_SIGNATURE: Final = b"PK\x06\x07"
TABLE_ENTRY_SIGNATURE: Final = b"PK\x01\x02"
LOCAL_HEADER_SIGNATURE: Final = b"PK\x03\x04"
DESCRIPTOR_SIGNATURE: Final = b"PK\x07\x08"
# The signatures of the records that may follow a member.
SIGNATURES: Final = (LOCAL_HEADER_SIGNATURE, DESCRIPTOR_SIGNATURE, TABLE_ENTRY_SIGNATURE)

# The value of a field whose number is in a zip64 record.
IN_ZIP64_16: Final = 0xFFFF
IN_ZIP64_32: Final = 0xFFFFFFFF
# The size that a zip64 end record states leaves out its signature and this size.
ZIP64_END_STATED_SIZE: Final = ZIP64_END.size - 12

STORED: Final = 0
DEFLATED: Final = 8
ENCRYPTED: Final = 1 << 0
PATCHED: Final = 1 << 5
STRONGLY_ENCRYPTED: Final = 1 << 6
MASKED: Final = 1 << 13
MS_DOS_DIRECTORY: Final = 0x10

_EXTRA_HEADER: Final = struct.Struct("<2H")
_ZIP64_EXTRA: Final = 1


class EndRecord(NamedTuple):
    """End of central directory record (4.3.16), the last bytes of a file."""

    signature: bytes
    number_of_this_disk: int
    disk_of_central_directory: int
    entries_on_this_disk: int
    total_entries: int
    size_of_central_directory: int
    offset_of_central_directory: int
    comment_length: int


class Zip64EndRecord(NamedTuple):
    """Zip64 end of central directory record (4.3.14), for large files; torch always writes it."""

    signature: bytes
    size_of_record: int
    version_made_by: int
    version_needed: int
    number_of_this_disk: int
    disk_of_central_directory: int
    entries_on_this_disk: int
    total_entries: int
    size_of_central_directory: int
    offset_of_central_directory: int


class Zip64Locator(NamedTuple):
    """Zip64 end of central directory locator (4.3.15), between both end records."""

    signature: bytes
    disk_of_zip64_end: int
    offset_of_zip64_end: int
    total_number_of_disks: int


class TableEntry(NamedTuple):
    """File header in the central directory (4.3.12); name, extra field and comment follow it."""

    signature: bytes
    version_made_by: int
    version_needed: int
    general_purpose_flags: int
    compression_method: int
    last_modified_time: int
    last_modified_date: int
    crc_32: int
    compressed_size: int
    uncompressed_size: int
    file_name_length: int
    extra_field_length: int
    file_comment_length: int
    disk_number_start: int
    internal_file_attributes: int
    external_file_attributes: int
    offset_of_local_header: int


class LocalHeader(NamedTuple):
    """Local file header (4.3.7) in front of a member; name and extra field follow it."""

    signature: bytes
    version_needed: int
    general_purpose_flags: int
    compression_method: int
    last_modified_time: int
    last_modified_date: int
    crc_32: int
    compressed_size: int
    uncompressed_size: int
    file_name_length: int
    extra_field_length: int


class Member(NamedTuple):
    """A member, as the table of members describes it.

    Attributes:
        name: Its name in the file, with the folder.
        header: The offset of its local header.
        packed: Its size in the file, in bytes.
        size: Its size, uncompressed.
        crc: The CRC-32 of its content, uncompressed.
        method: ``STORED`` or ``DEFLATED``.
    """

    name: str
    header: int
    packed: int
    size: int
    crc: int
    method: int


def member_of(entry: TableEntry, name: str, extra_field: bytes) -> Member:
    """Return the member of an entry, with the numbers that exceed 32 bits from its extra field."""
    # In the order of the zip64 extra field.
    numbers = [entry.uncompressed_size, entry.compressed_size, entry.offset_of_local_header]
    if IN_ZIP64_32 in numbers:
        numbers = _zip64_numbers(extra_field, numbers)
    size, packed, header = numbers
    return Member(name, header, packed, size, entry.crc_32, entry.compression_method)


def _zip64_numbers(extra_field: bytes, short: list[int]) -> list[int]:
    """Replace marked numbers by those of the zip64 extra field (4.5.3), in its order."""
    while len(extra_field) >= _EXTRA_HEADER.size:
        kind, length = _EXTRA_HEADER.unpack_from(extra_field)
        if kind == _ZIP64_EXTRA:
            long = struct.unpack_from(f"<{length // 8}Q", extra_field, _EXTRA_HEADER.size)
            numbers = iter(long)
            return [next(numbers, n) if n == IN_ZIP64_32 else n for n in short]
        extra_field = extra_field[_EXTRA_HEADER.size + length :]
    return short
