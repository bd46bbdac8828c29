// Package fence keeps a job's attempts apart: what an attempt that is over still writes
// never becomes part of a checkpoint of a later one.
//
// A launcher gives each attempt a Token, in LOCKSTEP_FENCE_TOKEN: unguessable, with a
// generation that grows from attempt to attempt. Ranks of one attempt meet under it
// (ccl mixes it into what they prove to each other), and Open takes a checkpoint directory
// for it, before anything is read there:
//
//	f, err := fence.FromEnv("/ckpt/llm")       // ErrHeld: a later attempt has it
//	w, err := f.Create("step-1000/rank3")      // is written aside
//	...
//	err = w.Commit()                           // and appears whole, or not at all
//	err = f.WriteFile("latest", []byte("1000"))
//	err = f.Remove("step-800")
//
// What a fence holds: once Open of one attempt has returned, no Commit, Publish, WriteFile
// or Remove of an earlier one changes anything there, on whatever node its rank
// runs, however long it was stopped, and at whatever instruction. That rests on the file system alone (link, mkdir and
// rename that happen at once for all, as POSIX and NFS have them), not on clocks or on
// anybody being reached:
//
//	DIR/.lockstep-fence/claim.GENERATION   made once, by link(2); the highest holds the directory
//	DIR/.lockstep-fence/stage.GENERATION   where an attempt writes; a rename out of it publishes
//
// Who opens makes its stage, then its claim, then looks for a higher one; who holds the
// highest then puts a file in the place of each lower stage. Either the earlier attempt sees
// the later one's claim, or its stage is taken away, and a rename from there fails.
//
// Writers that go around it are not held; Check tells those of their own accord.
package fence
