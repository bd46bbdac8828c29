package flags

import "testing"

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{"8": 8, "4k": 4096, "64M": 64 << 20, "1G": 1 << 30, "2KB": 2048} {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err != nil || s != want {
			t.Errorf("%s: %d, %v; want %d", text, s, err, want)
		}
	}
	for _, text := range []string{"", "K", "-1", "1T", "1.5M", "99999999999G"} {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is taken for %d", text, s)
		}
	}
}
