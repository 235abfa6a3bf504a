"""A spiece.model: what of it a tokenizer needs, by its numbers in sentencepiece_model.proto.

The module that comes with `sentencepiece` asks for a newer protobuf than some environments have.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format

UNIGRAM = 1  # TrainerSpec.ModelType
USER_DEFINED = 4  # ModelProto.SentencePiece.Type
FILE = """
name: "spiece.proto"
message_type {
  name: "Piece"
  field { name: "piece" number: 1 label: LABEL_REQUIRED type: TYPE_STRING }
  field { name: "score" number: 2 label: LABEL_OPTIONAL type: TYPE_FLOAT }
  field { name: "type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" }
}
message_type {
  name: "Trainer"
  field { name: "model_type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" }
}
message_type {
  name: "Normalizer"
  field { name: "precompiled_charsmap" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
}
message_type {
  name: "Model"
  field { name: "pieces" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Piece" }
  field { name: "trainer" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Trainer" }
  field { name: "normalizer" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Normalizer" }
}
"""
pool = descriptor_pool.DescriptorPool()
pool.Add(text_format.Parse(FILE, descriptor_pb2.FileDescriptorProto()))
Model = message_factory.GetMessageClass(pool.FindMessageTypeByName("Model"))


def parse(content: bytes) -> Model:
    """ValueError where this is no spiece.model."""
    try:
        model = Model.FromString(content)
    except message.DecodeError as error:
        raise ValueError("it is no SentencePiece model") from error
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model
