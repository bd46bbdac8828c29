package verbs

import _ "embed"

// ABI is the text of abi.h, for verbstest's library to be compiled with.
//
//go:embed abi.h
var ABI string
