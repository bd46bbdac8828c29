package flags

import (
	"fmt"
	"strconv"
	"strings"
)

// Size is a number of bytes with an optional unit.
type Size int

// UnmarshalText reads 8, 4K, 64M or 1G (powers of 1024), up to 1024G.
func (s *Size) UnmarshalText(b []byte) error {
	text := strings.TrimSuffix(strings.ToUpper(string(b)), "B")
	shift := 0
	if i := strings.IndexAny(text, "KMG"); i >= 0 && i == len(text)-1 {
		shift = 10 * (1 + strings.IndexByte("KMG", text[i]))
		text = text[:i]
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > 1<<40>>shift {
		return fmt.Errorf("size %q: want bytes, such as 8, 4K, 64M or 1G", b)
	}
	*s = Size(n << shift)
	return nil
}
