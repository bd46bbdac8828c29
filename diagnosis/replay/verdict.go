package replay

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	pb "github.com/lockstep-ccl/lockstep/diagnosis/replay/internal/evidencepb"
	"github.com/lockstep-ccl/lockstep/record"
)

func verdictMessage(v *diagnosis.Verdict) *pb.Verdict {
	m := &pb.Verdict{
		Key: v.Key, Class: uint32(v.Class), Level: uint32(v.Level), Comm: v.Comm, CommName: v.CommName,
		Coll: uint32(v.Coll), Seq: v.Seq, Since: v.Since, Victims: int64(v.Victims), Why: v.Why, Undetermined: v.Undetermined, Chain: v.Chain, Counter: v.Counter,
	}
	for _, c := range v.Culprits {
		m.Culprits = append(m.Culprits, &pb.Culprit{Kind: uint32(c.Kind), Rank: c.Rank, Peer: c.Peer, Node: c.Node, Reason: c.Reason})
	}
	return m
}

func verdictOf(m *pb.Verdict) diagnosis.Verdict {
	v := diagnosis.Verdict{
		Key: m.Key, Class: diagnosis.Class(m.Class), Level: diagnosis.Level(m.Level), Comm: m.Comm, CommName: m.CommName,
		Coll: record.CollKind(m.Coll), Seq: m.Seq, Since: m.Since, Victims: int(m.Victims), Why: m.Why, Undetermined: m.Undetermined, Chain: m.Chain, Counter: m.Counter,
	}
	for _, c := range m.Culprits {
		v.Culprits = append(v.Culprits, diagnosis.Culprit{Kind: diagnosis.CulpritKind(c.Kind), Rank: c.Rank, Peer: c.Peer, Node: c.Node, Reason: c.Reason})
	}
	return v
}

// sameVerdict reports whether two verdicts say the same of the same: sentences,
// estimates and counts that grow with time aside.
func sameVerdict(a, b *diagnosis.Verdict) bool {
	return a.Key == b.Key && a.Class == b.Class && a.Level == b.Level && slices.Equal(a.Culprits, b.Culprits)
}

func sameVerdicts(a, b []diagnosis.Verdict) bool {
	return slices.EqualFunc(a, b, func(a, b diagnosis.Verdict) bool { return sameVerdict(&a, &b) })
}

// settings lists the fields of a Config.
func settings(c *diagnosis.Config) (out []*pb.Setting, err error) {
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		s := &pb.Setting{Name: v.Type().Field(i).Name}
		switch f := v.Field(i); {
		case f.CanInt():
			s.Value = &pb.Setting_Integer{Integer: f.Int()}
		case f.CanUint():
			s.Value = &pb.Setting_Integer{Integer: int64(f.Uint())}
		case f.CanFloat():
			s.Value = &pb.Setting_Number{Number: f.Float()}
		case f.Kind() == reflect.Bool:
			s.Value = &pb.Setting_Flag{Flag: f.Bool()}
		case f.Kind() == reflect.String:
			s.Value = &pb.Setting_Text{Text: f.String()}
		default:
			return nil, fmt.Errorf("record the engine's configuration: %s is a %s, which no recording has", s.Name, f.Type())
		}
		out = append(out, s)
	}
	return out, nil
}

// applySettings fills c in, and returns the names of what it does not have.
func applySettings(c *diagnosis.Config, in []*pb.Setting) (unknown []string) {
	v := reflect.ValueOf(c).Elem()
	for _, s := range in {
		f := v.FieldByName(s.Name)
		ok := f.IsValid()
		switch x := s.Value.(type) {
		case *pb.Setting_Integer:
			if ok = ok && (f.CanInt() || f.CanUint()); ok && f.CanInt() {
				f.SetInt(x.Integer)
			} else if ok {
				f.SetUint(uint64(x.Integer))
			}
		case *pb.Setting_Number:
			if ok = ok && f.CanFloat(); ok {
				f.SetFloat(x.Number)
			}
		case *pb.Setting_Flag:
			if ok = ok && f.Kind() == reflect.Bool; ok {
				f.SetBool(x.Flag)
			}
		case *pb.Setting_Text:
			if ok = ok && f.Kind() == reflect.String; ok {
				f.SetString(x.Text)
			}
		default:
			ok = false
		}
		if !ok && len(unknown) < 64 {
			unknown = append(unknown, s.Name)
		}
	}
	return unknown
}

// effective fills in the defaults that c leaves open, as the engine does.
func effective(c diagnosis.Config) diagnosis.Config {
	v, defaults := reflect.ValueOf(&c).Elem(), reflect.ValueOf(diagnosis.DefaultConfig())
	for i := range v.NumField() {
		if v.Field(i).IsZero() {
			v.Field(i).Set(defaults.Field(i))
		}
	}
	return c
}
