package ccl

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"log/slog"
	"sync"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/record"
)

// runtimeDir is this user's runtime directory, the same for all ranks of a job on a node, ""
// when there is none. Where another user has taken its name they go where only who knows
// the job's secret looks; that is said once.
func runtimeDir(secret []byte, log *slog.Logger) string {
	if secret == nil {
		secret, _ = bootstrap.LoadSecret() // whoever joins with it hears why it cannot be read
	}
	key := ""
	if len(secret) > 0 {
		m := hmac.New(sha256.New, secret)
		_, _ = io.WriteString(m, "runtime directory")
		key = hex.EncodeToString(m.Sum(nil)[:8])
	}
	dir, refused, err := record.Dir(key)
	if len(refused) > 0 {
		elsewhere.Do(func() {
			if err != nil {
				log.Warn("no runtime directory: no flight recorder, and no shared memory", "err", err)
			} else {
				log.Warn("the runtime directory is not this user's alone: another one is used", "dir", dir, "err", refused[0])
			}
		})
	}
	return dir
}

var elsewhere sync.Once
