package kernels

import (
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"io"
)

//go:generate go run ./internal/genptx -o ptx

//go:embed ptx/*.gz
var modules embed.FS

// Module is the PTX of a module, "move" or "reduce_" and the name of a
// record.DType, for a device of the given compute capability: ended by a zero
// byte, as the driver wants it. It is nil when there is no such module or the
// device is older than 8.0.
func Module(name string, major, minor int) []byte {
	for _, arch := range []int{90, 80} {
		if 10*major+minor < arch {
			continue
		}
		ptx := unpack(fmt.Sprintf("ptx/%s.sm_%d.ptx.gz", name, arch))
		if ptx == nil {
			return nil
		}
		return append(ptx, 0)
	}
	return nil
}

// Cubin is the same module compiled for devices of exactly that compute capability, which
// spares the driver seconds of compiling, or nil where there is none. A driver that is too
// old for it refuses it, and takes the PTX.
func Cubin(name string, major, minor int) []byte {
	return unpack(cubin(name, major, minor))
}

// Compiled reports whether there is a Cubin, without unpacking it.
func Compiled(name string, major, minor int) bool {
	f, err := modules.Open(cubin(name, major, minor))
	if err != nil {
		return false
	}
	f.Close()
	return true
}

func cubin(name string, major, minor int) string {
	return fmt.Sprintf("ptx/%s.sm_%d%d.cubin.gz", name, major, minor)
}

// unpack is a file of modules; nil when there is none.
func unpack(path string) []byte {
	packed, err := modules.ReadFile(path)
	if err != nil {
		return nil
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil
	}
	b, err := io.ReadAll(z)
	if err != nil {
		return nil
	}
	return b
}
