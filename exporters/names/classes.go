package names

// Values of LabelClass and LabelLevel: diagnosis.Class and diagnosis.Level in
// words (a test there keeps them equal). Rules and policies match on these.
const (
	ClassCommunicationHang    = "communication_hang"
	ClassNoncommunicationHang = "noncommunication_hang"
	ClassCommunicationSlow    = "communication_slow"
	ClassNoncommunicationSlow = "noncommunication_slow"

	LevelSuspected = "suspected"
	LevelConfirmed = "confirmed"
)

// Classes lists the four fault classes.
var Classes = []string{ClassCommunicationHang, ClassNoncommunicationHang, ClassCommunicationSlow, ClassNoncommunicationSlow}
