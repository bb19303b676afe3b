from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelIdentity(_message.Message):
    __slots__ = ("name", "config_digest", "tokenizer_digest", "chat_template_digest", "adapter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    config_digest: bytes
    tokenizer_digest: bytes
    chat_template_digest: bytes
    adapter: Adapter
    def __init__(self, name: _Optional[str] = ..., config_digest: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., chat_template_digest: _Optional[bytes] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("base_digest", "base_name", "peft_config_json")
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_NAME_FIELD_NUMBER: _ClassVar[int]
    PEFT_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    base_digest: bytes
    base_name: str
    peft_config_json: bytes
    def __init__(self, base_digest: _Optional[bytes] = ..., base_name: _Optional[str] = ..., peft_config_json: _Optional[bytes] = ...) -> None: ...
