"""flowdflash trains DFlash draft models from a YAML pipeline: a DAG of typed stages run by a threaded executor."""

__version__ = "0.1.0"
