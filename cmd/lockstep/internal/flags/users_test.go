package flags

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestJobUsers(t *testing.T) {
	got, err := JobUsers([]string{"llm=root", "moe=4711"})
	if want := map[string]uint32{"llm": 0, "moe": 4711}; err != nil || !cmp.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for flag, want := range map[string]string{
		"llm":                   "JOB=USER",
		"=root":                 "JOB=USER",
		"llm=":                  "JOB=USER",
		"llm=nobody-of-a-name":  "id -u",
		"llm=-1":                "id -u",
		"llm=4294967296":        "id -u",
		"../etc=root":           "--job-user ../etc=root",
		"llm=root,moe=somebody": "id -u",
	} {
		if _, err := JobUsers([]string{flag}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", flag, err)
		}
	}
	if _, err := JobUsers([]string{"llm=1", "llm=2"}); err == nil {
		t.Error("two users of one job")
	}
}
