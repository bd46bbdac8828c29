package cuda

// proc is a function of the driver API.
type proc int

const (
	cuInit proc = iota
	cuDriverGetVersion
	cuGetErrorName
	cuGetErrorString
	cuThreadExchangeStreamCaptureMode
	cuCtxSetCurrent
	cuCtxSynchronize
	cuDeviceGetCount
	cuDeviceGet
	cuDeviceGetName
	cuDeviceGetUUID
	cuDeviceGetPCIBusID
	cuDeviceGetAttribute
	cuDeviceCanAccessPeer
	cuDeviceGetP2PAttribute
	cuDevicePrimaryCtxRetain
	cuDevicePrimaryCtxRelease
	cuModuleLoadDataEx
	cuModuleUnload
	cuModuleGetFunction
	cuFuncGetAttribute
	cuFuncSetAttribute
	cuOccupancyMaxActiveBlocksPerMultiprocessor
	cuMemAlloc
	cuMemFree
	cuMemHostAlloc
	cuMemFreeHost
	cuMemHostRegister
	cuMemHostUnregister
	cuMemHostGetDevicePointer
	cuMemGetAddressRange
	cuMemGetHandleForAddressRange
	cuPointerGetAttribute
	cuMemGetAllocationGranularity
	cuMemCreate
	cuMemRelease
	cuMemExportToShareableHandle
	cuMemImportFromShareableHandle
	cuMemAddressReserve
	cuMemAddressFree
	cuMemMap
	cuMemUnmap
	cuMemSetAccess
	cuStreamCreateWithPriority
	cuStreamDestroy
	cuStreamQuery
	cuStreamSynchronize
	cuStreamWaitEvent
	cuStreamWriteValue32
	cuStreamWaitValue32
	cuStreamBatchMemOp
	cuStreamIsCapturing
	cuStreamBeginCapture
	cuStreamEndCapture
	cuMemcpyAsync
	cuMemcpyHtoDAsync
	cuMemcpyDtoHAsync
	cuMemsetD8Async
	cuMemsetD32Async
	cuLaunchKernel
	cuEventCreate
	cuEventDestroy
	cuEventRecord
	cuEventQuery
	cuEventSynchronize
	cuEventElapsedTime
	cuGraphInstantiateWithFlags
	cuGraphLaunch
	cuGraphDestroy
	cuGraphExecDestroy
	procs // how many
)

// symbols are the names in libcuda. cuda.h maps a plain name to the newest of
// several versions; a plain symbol is often the oldest, with another signature.
var symbols = [procs]string{
	cuInit:                            "cuInit",
	cuDriverGetVersion:                "cuDriverGetVersion",
	cuGetErrorName:                    "cuGetErrorName",
	cuGetErrorString:                  "cuGetErrorString",
	cuThreadExchangeStreamCaptureMode: "cuThreadExchangeStreamCaptureMode",
	cuCtxSetCurrent:                   "cuCtxSetCurrent",
	cuCtxSynchronize:                  "cuCtxSynchronize",
	cuDeviceGetCount:                  "cuDeviceGetCount",
	cuDeviceGet:                       "cuDeviceGet",
	cuDeviceGetName:                   "cuDeviceGetName",
	cuDeviceGetUUID:                   "cuDeviceGetUuid_v2",
	cuDeviceGetPCIBusID:               "cuDeviceGetPCIBusId",
	cuDeviceGetAttribute:              "cuDeviceGetAttribute",
	cuDeviceCanAccessPeer:             "cuDeviceCanAccessPeer",
	cuDeviceGetP2PAttribute:           "cuDeviceGetP2PAttribute",
	cuDevicePrimaryCtxRetain:          "cuDevicePrimaryCtxRetain",
	cuDevicePrimaryCtxRelease:         "cuDevicePrimaryCtxRelease_v2",
	cuModuleLoadDataEx:                "cuModuleLoadDataEx",
	cuModuleUnload:                    "cuModuleUnload",
	cuModuleGetFunction:               "cuModuleGetFunction",
	cuFuncGetAttribute:                "cuFuncGetAttribute",
	cuFuncSetAttribute:                "cuFuncSetAttribute",
	cuOccupancyMaxActiveBlocksPerMultiprocessor: "cuOccupancyMaxActiveBlocksPerMultiprocessor",
	cuMemAlloc:                     "cuMemAlloc_v2",
	cuMemFree:                      "cuMemFree_v2",
	cuMemHostAlloc:                 "cuMemHostAlloc",
	cuMemFreeHost:                  "cuMemFreeHost",
	cuMemHostRegister:              "cuMemHostRegister_v2",
	cuMemHostUnregister:            "cuMemHostUnregister",
	cuMemHostGetDevicePointer:      "cuMemHostGetDevicePointer_v2",
	cuMemGetAddressRange:           "cuMemGetAddressRange_v2",
	cuMemGetHandleForAddressRange:  "cuMemGetHandleForAddressRange",
	cuPointerGetAttribute:          "cuPointerGetAttribute",
	cuMemGetAllocationGranularity:  "cuMemGetAllocationGranularity",
	cuMemCreate:                    "cuMemCreate",
	cuMemRelease:                   "cuMemRelease",
	cuMemExportToShareableHandle:   "cuMemExportToShareableHandle",
	cuMemImportFromShareableHandle: "cuMemImportFromShareableHandle",
	cuMemAddressReserve:            "cuMemAddressReserve",
	cuMemAddressFree:               "cuMemAddressFree",
	cuMemMap:                       "cuMemMap",
	cuMemUnmap:                     "cuMemUnmap",
	cuMemSetAccess:                 "cuMemSetAccess",
	cuStreamCreateWithPriority:     "cuStreamCreateWithPriority",
	cuStreamDestroy:                "cuStreamDestroy_v2",
	cuStreamQuery:                  "cuStreamQuery",
	cuStreamSynchronize:            "cuStreamSynchronize",
	cuStreamWaitEvent:              "cuStreamWaitEvent",
	cuStreamWriteValue32:           "cuStreamWriteValue32_v2",
	cuStreamWaitValue32:            "cuStreamWaitValue32_v2",
	cuStreamBatchMemOp:             "cuStreamBatchMemOp_v2",
	cuStreamIsCapturing:            "cuStreamIsCapturing",
	cuStreamBeginCapture:           "cuStreamBeginCapture_v2",
	cuStreamEndCapture:             "cuStreamEndCapture",
	cuMemcpyAsync:                  "cuMemcpyAsync",
	cuMemcpyHtoDAsync:              "cuMemcpyHtoDAsync_v2",
	cuMemcpyDtoHAsync:              "cuMemcpyDtoHAsync_v2",
	cuMemsetD8Async:                "cuMemsetD8Async",
	cuMemsetD32Async:               "cuMemsetD32Async",
	cuLaunchKernel:                 "cuLaunchKernel",
	cuEventCreate:                  "cuEventCreate",
	cuEventDestroy:                 "cuEventDestroy_v2",
	cuEventRecord:                  "cuEventRecord",
	cuEventQuery:                   "cuEventQuery",
	cuEventSynchronize:             "cuEventSynchronize",
	cuEventElapsedTime:             "cuEventElapsedTime",
	cuGraphInstantiateWithFlags:    "cuGraphInstantiateWithFlags",
	cuGraphLaunch:                  "cuGraphLaunch",
	cuGraphDestroy:                 "cuGraphDestroy",
	cuGraphExecDestroy:             "cuGraphExecDestroy",
}

// optional are those whose lack is the error of what needs them.
var optional = [procs]bool{cuMemGetHandleForAddressRange: true}
