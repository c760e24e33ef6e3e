"""The messages of `inference.GRPCInferenceService`: names, numbers and types, as on the wire.

A message is a row of fields "number name: type". A type is a scalar, another message, an enum, `[T]` for a
repeated one, or `{T}` for a map from strings. A field after `|` belongs to the message's one oneof.
"""

PACKAGE = "inference"
SERVICE = "inference.GRPCInferenceService"

ENUMS = {
    "DataType": (
        "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 "
        "TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16"
    ),
    "Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
}

MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live: bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready: bool",
    "ModelReadyRequest": "1 name: string; 2 version: string",
    "ModelReadyResponse": "1 ready: bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name: string; 2 version: string; 3 extensions: [string]",
    "ModelMetadataRequest": "1 name: string; 2 version: string",
    # Parameters are MLServer's extension.
    "TensorMetadata": "1 name: string; 2 datatype: string; 3 shape: [int64]; 4 parameters: {InferParameter}",
    "ModelMetadataResponse": (
        "1 name: string; 2 versions: [string]; 3 platform: string; 4 inputs: [TensorMetadata]; "
        "5 outputs: [TensorMetadata]; 6 parameters: {InferParameter}"
    ),
    "InferParameter": (
        "|1 bool_param: bool; |2 int64_param: int64; |3 string_param: string; |4 double_param: double; "
        "|5 uint64_param: uint64"
    ),
    "InferTensorContents": (
        "1 bool_contents: [bool]; 2 int_contents: [int32]; 3 int64_contents: [int64]; "
        "4 uint_contents: [uint32]; 5 uint64_contents: [uint64]; 6 fp32_contents: [float]; "
        "7 fp64_contents: [double]; 8 bytes_contents: [bytes]"
    ),
    "InferInputTensor": (
        "1 name: string; 2 datatype: string; 3 shape: [int64]; 4 parameters: {InferParameter}; "
        "5 contents: InferTensorContents"
    ),
    "InferRequestedOutputTensor": "1 name: string; 2 parameters: {InferParameter}",
    "InferOutputTensor": (
        "1 name: string; 2 datatype: string; 3 shape: [int64]; 4 parameters: {InferParameter}; "
        "5 contents: InferTensorContents"
    ),
    "ModelInferRequest": (
        "1 model_name: string; 2 model_version: string; 3 id: string; 4 parameters: {InferParameter}; "
        "5 inputs: [InferInputTensor]; 6 outputs: [InferRequestedOutputTensor]; 7 raw_input_contents: [bytes]"
    ),
    "ModelInferResponse": (
        "1 model_name: string; 2 model_version: string; 3 id: string; 4 parameters: {InferParameter}; "
        "5 outputs: [InferOutputTensor]; 6 raw_output_contents: [bytes]"
    ),
    "ModelStreamInferResponse": "1 error_message: string; 2 infer_response: ModelInferResponse",
    "ModelConfigRequest": "1 name: string; 2 version: string",
    "ModelConfigResponse": "1 config: ModelConfig",
    # Of a model's configuration, the parts that this server has.
    "ModelConfig": (
        "1 name: string; 2 platform: string; 17 backend: string; 4 max_batch_size: int32; "
        "5 input: [ModelInput]; 6 output: [ModelOutput]; 7 instance_group: [ModelInstanceGroup]; "
        "11 dynamic_batching: ModelDynamicBatching; 14 parameters: {ModelParameter}"
    ),
    "ModelInput": "1 name: string; 2 data_type: DataType; 4 dims: [int64]; 8 optional: bool",
    "ModelOutput": "1 name: string; 2 data_type: DataType; 3 dims: [int64]",
    "ModelInstanceGroup": "1 name: string; 4 kind: Kind; 2 count: int32",
    "ModelDynamicBatching": "2 max_queue_delay_microseconds: uint64",
    "ModelParameter": "1 string_value: string",
    "ModelStatisticsRequest": "1 name: string; 2 version: string",
    "ModelStatisticsResponse": "1 model_stats: [ModelStatistics]",
    "ModelStatistics": (
        "1 name: string; 2 version: string; 3 last_inference: uint64; 4 inference_count: uint64; "
        "5 execution_count: uint64; 6 inference_stats: InferStatistics; 7 batch_stats: [InferBatchStatistics]"
    ),
    "StatisticDuration": "1 count: uint64; 2 ns: uint64",
    "InferStatistics": (
        "1 success: StatisticDuration; 2 fail: StatisticDuration; 3 queue: StatisticDuration; "
        "4 compute_input: StatisticDuration; 5 compute_infer: StatisticDuration; "
        "6 compute_output: StatisticDuration; 7 cache_hit: StatisticDuration; 8 cache_miss: StatisticDuration"
    ),
    "InferBatchStatistics": (
        "1 batch_size: uint64; 2 compute_input: StatisticDuration; 3 compute_infer: StatisticDuration; "
        "4 compute_output: StatisticDuration"
    ),
    "RepositoryIndexRequest": "1 repository_name: string; 2 ready: bool",
    "RepositoryIndexResponse": "1 models: [ModelIndex]",
    "ModelIndex": "1 name: string; 2 version: string; 3 state: string; 4 reason: string",
    "ModelRepositoryParameter": (
        "|1 bool_param: bool; |2 int64_param: int64; |3 string_param: string; |4 bytes_param: bytes"
    ),
    "RepositoryModelLoadRequest": (
        "1 repository_name: string; 2 model_name: string; 3 parameters: {ModelRepositoryParameter}"
    ),
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": (
        "1 repository_name: string; 2 model_name: string; 3 parameters: {ModelRepositoryParameter}"
    ),
    "RepositoryModelUnloadResponse": "",
    "SystemSharedMemoryStatusRequest": "1 name: string",
    "SystemSharedMemoryStatusResponse": "1 regions: {SystemRegionStatus}",
    "SystemRegionStatus": "1 name: string; 2 key: string; 3 offset: uint64; 4 byte_size: uint64",
    "SystemSharedMemoryRegisterRequest": (
        "1 name: string; 2 key: string; 3 offset: uint64; 4 byte_size: uint64"
    ),
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "1 name: string",
    "SystemSharedMemoryUnregisterResponse": "",
    "CudaSharedMemoryStatusRequest": "1 name: string",
    "CudaSharedMemoryStatusResponse": "1 regions: {CudaRegionStatus}",
    "CudaRegionStatus": "1 name: string; 2 device_id: uint64; 3 byte_size: uint64",
    "CudaSharedMemoryRegisterRequest": (
        "1 name: string; 2 raw_handle: bytes; 3 device_id: int64; 4 byte_size: uint64"
    ),
    "CudaSharedMemoryRegisterResponse": "",
    "CudaSharedMemoryUnregisterRequest": "1 name: string",
    "CudaSharedMemoryUnregisterResponse": "",
}
