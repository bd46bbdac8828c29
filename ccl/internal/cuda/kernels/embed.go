package kernels

import (
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"io"
)

//go:generate go run ./internal/genptx -o ptx

//go:embed ptx/*.ptx.gz
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
		packed, err := modules.ReadFile(fmt.Sprintf("ptx/%s.sm_%d.ptx.gz", name, arch))
		if err != nil {
			return nil
		}
		z, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			return nil
		}
		ptx, err := io.ReadAll(z)
		if err != nil {
			return nil
		}
		return append(ptx, 0)
	}
	return nil
}
