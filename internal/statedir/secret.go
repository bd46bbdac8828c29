package statedir

import (
	"bytes"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// maxSecret bounds the file of a token or key, chains of certificates included.
const maxSecret = 1 << 20

// ReadSecret reads a token or key, white space at its ends trimmed, and refuses one that
// others could have read or written. It may lie behind links, as those of a Kubernetes
// volume do: whose it is and who may read it is asked of the file that is read.
func ReadSecret(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	defer f.Close()
	st, err := checkSecret(f)
	if err != nil {
		return nil, err
	}
	b, err := readAll(f, st, maxSecret)
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	return bytes.TrimSpace(b), nil
}

// CheckSecret is what ReadSecret refuses a file for.
func CheckSecret(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	defer f.Close()
	_, err = checkSecret(f)
	return err
}

func checkSecret(f *os.File) (*unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("secret: %s: %w", f.Name(), err)
	}
	mode := st.Mode & 0o7777
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("secret: %s is no regular file: %w", f.Name(), ErrForeign)
	case st.Uid != uint32(os.Geteuid()) && !trusted(st.Uid):
		return nil, fmt.Errorf("secret: %s is user %d's, who knows it then, and this process is user %d's: %w: chown it", f.Name(), st.Uid, os.Geteuid(), ErrForeign)
	case mode&0o077 == 0:
	case mode&0o337 == 0 && trusted(st.Uid) && (os.Geteuid() == 0 || st.Uid != uint32(os.Geteuid()) && inGroup(st.Gid)):
		// How root lends it to a service: Kubernetes' fsGroup with defaultMode 0440.
	default:
		return nil, fmt.Errorf("secret: %s is open to others (mode %04o): %w: chmod 600 it (0440, root's and of this process's group, in a Kubernetes volume)", f.Name(), mode, ErrForeign)
	}
	return &st, nil
}

func inGroup(gid uint32) bool {
	groups, err := os.Getgroups()
	return int(gid) == os.Getegid() || err == nil && slices.Contains(groups, int(gid))
}
