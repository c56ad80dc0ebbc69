"""The report: pages of HTML made from nothing but the files of run folders."""
